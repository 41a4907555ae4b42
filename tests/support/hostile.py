"""Reports in which every name that can be is an attack."""

from __future__ import annotations

import msgspec
from sample_reports import finding, first_event, report, weight

from gradcheck_dist.diagnosis.finding import (
    Candidate,
    Coverage,
    Factor,
    MissingProbe,
    Report,
    RuleOutcomes,
    RunInfo,
    Tool,
    Unidentifiable,
    UnitInfo,
)

ATTACK = (
    "\x1b]0;owned\x07\x1b[31m</script><script>window.owned=1</script><img src=x onerror=window.owned=1>"
    "\"'><a href='https://evil.example/'>x</a>\n::error file=/etc/passwd::owned\n]]> %0A::set-output &lt;b&gt; "
    "${{ github.token }} =cmd|' /C calc'!A0 \u202e \ufffe \ud800"
)
PATHS = ("../../../etc/passwd.py", "/etc/passwd.py", "https://evil.example/x.py", "javascript:alert(1).py", "C:\\x.py")
MEGABYTE = "<img src=x onerror=window.owned=1>" + "x" * 1_000_000


def hostile_report(text: str = ATTACK, path: str | None = None) -> Report:
    """`text` stands wherever a trace's words can come to stand."""
    event = first_event(
        kind=text,
        op=text,
        file=path if path is not None else text,
        function=text,
        configured_at=f"{text}:3",
        called_from=f"{text}:4",
        unrecorded=True,
        before={"kind": text},
        written=text,
        evaluated_at=f"{text}:5",
    )
    factor = Factor(observed=0.5, expression=text, exact=text)
    factor.candidates = [Candidate(expression=text + "!", value=2.0, evidence=text)]
    bad = finding(
        code=text,
        name=text,
        factor=factor,
        pattern=text,
        units=[text, text + "2"],
        first_event=event,
        explanation=text,
        fix=text,
        suggested_experiment=text,
        consequence=text,
    )
    cells = [weight(rank, k, 0.5, unit=text) for rank in (0, 1) for k in range(3)]
    cells += [weight(rank, k, 1.0, unit=text + "2") for rank in (0, 1) for k in range(3)]
    for cell in cells:
        cell.expected_exact = text
    made = report([bad], cells)
    made.tool = Tool(name=text, version=text)
    made.run = RunInfo(
        id=text,
        command=[text],
        world_size=2,
        torch_version=text,
        device_type=text,
        axes={"dp_replicate": 2, text: 3},
        axes_from=text,
        objective=text,
        objective_from=text,
        steps=[0, 1],
        dtype=text,
        scenario=text,
        variant=text,
    )
    made.rules = RuleOutcomes(passed=[text + "p"], failed=[text], not_triggered=[text + "n"])
    made.coverage = Coverage(
        unidentifiable=[Unidentifiable(parameter=text, reason=text)],
        probes_active=[text],
        probes_missing=[MissingProbe(probe=text, reason=text)],
        problems=[text],
    )
    made.units = [UnitInfo(unit=text, parameters=[text])]
    made.metrics = {text: [1.0, 2.0]}
    made.reasons, made.next_step = [text], text
    return msgspec.convert(msgspec.to_builtins(made), Report)

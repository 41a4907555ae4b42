"""Two faults at once: each is named with its own number, on its own line, and nothing else is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch

GROUP = ("GS103", "backward", 2.0)
NEVER = ("GS103", "backward", 4.0)
MEANS = ("GS301", "loss", "accumulation_steps * num_tokens/(contributions * n_c)")
PADDED = ("GS303", "loss", "as if the step had 133 tokens, where 128 enter")
SCALED = ("GS000", "grad_write", 1 / 3)


@pytest.mark.parametrize(
    ("faults", "found"),
    [
        (("group",), [GROUP]),
        (("group", "means"), [GROUP, MEANS]),
        (("group", "padded"), [GROUP, PADDED]),
        (("group", "scaled"), [SCALED, GROUP]),
        (("group", "undone average"), [GROUP, ("GS303", "loss", 0.25)]),
        (("never", "means"), [NEVER, MEANS]),
        (("never", "padded"), [NEVER, PADDED]),
        (("never", "scaled"), [SCALED, NEVER]),
        (("padded", "scaled"), [SCALED, PADDED]),
        (("padded", "undone average"), [("GS303", "loss", "divides by 133 of them, and what follows by 4")]),
        (
            ("padded by half",),
            [("GS303", "loss", "as if the step had 192 tokens, where 128 enter the loss, or 48, if")],
        ),
        (("times ranks", "counted twice"), [("GS303", "loss", 0.5)]),
        (("summed",), [("GS303", "loss", "adds up the gradients of 4 ranks")]),
    ],
)
def test_both_faults_are_named(
    tmp_path: Path, faults: tuple[str, ...], found: list[tuple[str, str, float | str]]
) -> None:
    launch("pair_workers:train", (faults, str(tmp_path / "run")), 4, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    told = {finding.code: finding for finding in report.findings}
    assert sorted(told) == sorted(code for code, _, _ in found) and len(told) == len(report.findings)
    for code, kind, what in found:
        finding = told[code]
        assert finding.first_event is not None and finding.first_event.kind == kind
        if isinstance(what, float):
            assert finding.factor.observed == pytest.approx(what, rel=1e-4)
        else:
            assert what in f"{finding.factor.expression} {finding.explanation}"

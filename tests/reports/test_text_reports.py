"""Reports for eyes: terminal, pipe, pull request."""

from __future__ import annotations

import io
import re
import time

import msgspec
import pytest
from sample_reports import finding, first_event, report, weight

from gradcheck_dist.diagnosis.finding import (
    Candidate,
    Coverage,
    Factor,
    MissingProbe,
    Report,
    RunInfo,
    ScenarioReport,
    Tool,
    UnitInfo,
    VariantReport,
)
from gradcheck_dist.reports import markdown, plain, terminal
from gradcheck_dist.reports.coverage import coverage_lines
from gradcheck_dist.reports.document import build
from gradcheck_dist.reports.weights import shown_step

HOSTILE = "\x1b]0;owned\x07\x1b[31m[bold red]@everyone #1 <img src=x> ![x](http://evil) `` | \u202e\n# heading"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(document: Report, monkeypatch: pytest.MonkeyPatch, columns: int = 110) -> str:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    terminal.write_report(document, stream)
    return stream.getvalue()


def hostile_report() -> Report:
    event = first_event(kind=HOSTILE, op=HOSTILE, file=HOSTILE, configured_at=HOSTILE)
    bad = finding(
        code=HOSTILE,
        name=HOSTILE,
        pattern=HOSTILE,
        explanation=HOSTILE,
        fix=HOSTILE,
        units=[HOSTILE],
        factor=Factor(observed=2.0, expression=HOSTILE, candidates=[Candidate(expression=HOSTILE, value=2.0)]),
        first_event=event,
        consequence=HOSTILE,
    )
    return report(
        [bad],
        run=RunInfo(id=HOSTILE, world_size=2, axes={"dp_replicate": 2}, objective=HOSTILE, dtype=HOSTILE),
        coverage=Coverage(problems=[HOSTILE], probes_active=[HOSTILE]),
        units=[UnitInfo(unit="all", parameters=[HOSTILE])],
    )


def huge_report() -> Report:
    findings = [
        finding(units=[f"unit.{'x' * 200}.{i}" for i in range(500)], explanation="y " * 5000) for _ in range(300)
    ]
    weights = [
        weight(rank, step, 0.5 + unit, unit=f"unit {unit}", microbatch=m)
        for unit in range(6)
        for rank in range(32)
        for step in range(16)
        for m in range(4)
    ]
    problems = [f"rank {rank}: its trace file is missing {'z' * 300}" for rank in range(1000)]
    return report(findings, weights, coverage=Coverage(problems=problems))


def test_a_pipe_begins_with_what_where_why_and_what_to_do_and_then_shows_the_table() -> None:
    lines = plain.render(build(report())).splitlines()
    labels = [line.split()[0] for line in lines[1:5]]
    assert labels == ["verdict", "where", "why", "next"]
    assert "GS101 double-averaging" in lines[1]
    assert "1/dp_replicate" in lines[1]
    assert "gradcheck_dist/errors.py:9" in lines[2]
    assert lines[6].startswith("Weight of one token's loss")


def test_of_a_line_in_a_package_the_first_lines_have_the_programs_own_too() -> None:
    found = build(report([finding(first_event=first_event(called_from="/somewhere/train.py:7"))]))
    assert found.where.startswith("gradcheck_dist/errors.py:9") and "called from /somewhere/train.py:7" in found.where


def test_all_parameters_of_an_optimizer_that_steps_in_turns_are_not_those_of_the_run() -> None:
    one = finding(first_event=first_event(), num_parameters=2, units=["all parameters"], steps=[0, 2])
    document = report([one], coverage=Coverage(parameters_total=9, parameters_observed=9))
    assert "; 2 of 9 parameters (all that steps 0, 2 read)" in build(document).where
    document.coverage.parameters_total = 2
    assert "parameters (" not in build(document).where
    assert build(document).findings[0].where.startswith("2 parameters (all parameters)")


def test_a_change_that_nobody_recorded_is_looked_for_between_two_lines_which_are_shown_where_near() -> None:
    before = {"kind": "clip", "file": "gradcheck_dist/errors.py", "line": 14}
    unrecorded = first_event(unrecorded=True, before=before)
    found = build(report([finding(first_event=unrecorded, num_parameters=3)], coverage=Coverage(parameters_total=9)))
    between = "between gradcheck_dist/errors.py:9 (reduce avg over group [0, 1]) and gradcheck_dist/errors.py:14 (clip)"
    assert found.where.startswith(between)
    assert "; 3 of 9 parameters (" in found.where
    culprit = found.findings[0].culprit
    assert culprit is not None and culprit.excerpt is not None
    shown = culprit.excerpt.numbered()
    assert [number for marked, number, _ in shown if marked] == [9, 14]
    assert [number for _, number, _ in shown] == list(range(7, 15))
    far = build(report([finding(first_event=first_event(unrecorded=True, before=before | {"line": 25}))]))
    culprit = far.findings[0].culprit
    assert culprit is not None and culprit.excerpt is not None and culprit.excerpt.marked == (9,)


def test_a_headline_without_a_rules_name_has_the_explanation_that_fits_as_well_too() -> None:
    rivals = [Candidate(expression="1/dp_replicate", value=0.5), Candidate(expression="1/K", value=0.5)]
    factor = Factor(observed=0.5, expression="1/dp_replicate", candidates=rivals)
    assert "= 0.5 = 1/dp_replicate or 1/K" in build(report([finding(code="GS000", factor=factor)])).headline
    named = build(report([finding(code="GS101", factor=factor)])).headline
    assert "1/dp_replicate" in named and "1/K" not in named


def test_the_table_is_data_rank_by_accumulation_step_with_expected_observed_and_ratio() -> None:
    weights = [weight(rank, k, ratio) for rank in (0, 1) for k, ratio in enumerate((4.0, 2.0, 1.0))]
    text = plain.render(build(report(weights=weights)))
    assert re.search(r"k=0 +k=1 +k=2", text)
    assert len(re.findall(r"ratio +4 +2 +1$", text, re.M)) == 2
    assert len(re.findall(r"expected +1/296 +1/296 +1/296$", text, re.M)) == 2
    assert "ratio from 1 to 4" in text


def test_microbatches_are_rows_where_there_are_several() -> None:
    weights = [weight(0, k, 1.0, microbatch=m) for k in range(2) for m in range(2)]
    text = plain.render(build(report([], weights)))
    assert "data rank 0 m=0" in text
    assert "data rank 0 m=1" in text


def test_parameters_with_other_weights_get_a_table_of_their_own_the_worst_first() -> None:
    weights = [weight(0, 0, 1.0, unit="dense"), weight(0, 0, 2.0, unit="experts"), weight(0, 0, 1.0, unit="head")]
    tables = build(report(weights=weights)).tables
    assert ["experts" in table.caption for table in tables] == [True, False]
    assert "dense, head" in tables[1].caption


def test_a_weight_that_could_not_be_identified_is_no_number() -> None:
    text = plain.render(build(report(weights=[weight(0, 0, 0.5), weight(0, 1, None)])))
    assert re.search(r"observed +0\.0016892 +-$", text, re.M)
    assert re.search(r"ratio +0\.5 +-$", text, re.M)


def test_a_weight_within_its_own_error_reads_as_none() -> None:
    lost = msgspec.structs.replace(weight(0, 0, -3e-9), stderr=1e-11)
    small = msgspec.structs.replace(weight(0, 1, 3e-7), stderr=1e-11)
    text = plain.render(build(report(weights=[lost, small])))
    assert re.search(r"observed +0 +1\.0135e-09$", text, re.M)
    assert re.search(r"ratio +0 +3e-07$", text, re.M)


def test_the_culprit_is_one_line_with_its_source_below() -> None:
    lines = plain.render(build(report())).splitlines()
    index = lines.index("  gradcheck_dist/errors.py:9  reduce avg over group [0, 1]")
    assert any(line.startswith("    >    9 | class GradcheckError") for line in lines[index:])


@pytest.mark.parametrize("file", ["/etc/passwd", "../../../etc/hosts.py", "/proc/self/environ", "x\0.py", ".git/x.py"])
def test_no_file_of_this_machine_is_shown_because_a_trace_names_it(file: str) -> None:
    text = plain.render(build(report([finding(first_event=first_event(file=file, line=1))])))
    assert " > " not in text
    assert "root:" not in text


def test_rival_explanations_and_the_experiment_between_them_are_told() -> None:
    rivals = [Candidate(expression="1/dp_replicate", value=0.5), Candidate(expression="1/K", value=0.5)]
    factor = Factor(observed=0.5, expression="1/dp_replicate", candidates=rivals)
    text = plain.render(build(report([finding(factor=factor, suggested_experiment="Run again with 3 steps.")])))
    assert "also explained by 1/K" in text
    assert "Run again with 3 steps." in text
    assert "also explained by 1/dp_replicate" not in text


def test_every_verdict_has_its_word() -> None:
    assert "CLEAN" in plain.render(build(report([])))
    unclear = report([], [], verdict="undetermined", reasons=["No loss was seen."], next_step="Call mark_loss().")
    text = plain.render(build(unclear))
    assert "COULD NOT JUDGE: No loss was seen." in text
    assert "Call mark_loss()." in text


def test_a_headline_gives_no_single_number_for_weights_that_are_several() -> None:
    several = finding(factor=Factor(observed=2.0), pattern="x 0 to x 2 (median 1)")
    assert "observed / expected: x 0 to x 2 (median 1)" in build(report([several])).headline
    one = finding(factor=Factor(observed=2.37), pattern="every contribution x 2.37")
    assert "observed / expected = 2.37 (every contribution x 2.37)" in build(report([one])).headline


def test_of_a_long_reason_the_first_clause_is_the_headline_and_the_rest_is_why() -> None:
    reason = "the loss counts nothing (a mean: of what?), so it is not judged: weights are compared. " + "More. " * 30
    document = build(report([], [], verdict="undetermined", reasons=[reason]))
    assert document.headline == "COULD NOT JUDGE: the loss counts nothing (a mean: of what?), so it is not judged"
    assert document.why.startswith("Weights are compared. More. More.")
    assert document.why.endswith("More. No weight could be compared.")


def test_reasons_that_differ_in_numbers_alone_are_told_once() -> None:
    reasons = [f"the loss at train.py:12 weighs x {number} of a mean" for number in (0.3, 0.3704, 1e-06)]
    document = build(report([], [], verdict="undetermined", reasons=[*reasons, "rank 1 is missing"]))
    assert document.headline == "COULD NOT JUDGE: the loss at train.py:12 weighs x 0.3 of a mean"
    assert document.why == (
        "Rank 1 is missing. 2 more reasons differ from these in numbers alone (--format json). No weight could be "
        "compared."
    )


def test_one_rank_is_not_called_ranks_and_a_loss_multiplies_nothing() -> None:
    text = plain.render(build(report([finding(ranks=[3], first_event=first_event(kind="loss", nominal_factor=None))])))
    assert "on rank 3, step 0" in text and "multiplies by" not in text
    assert "multiplies by 0.5 as measured" in plain.render(
        build(report([finding(first_event=first_event(nominal_factor=None))]))
    )


@pytest.mark.parametrize("document", [report(), hostile_report(), huge_report()], ids=["plain", "hostile", "huge"])
def test_a_pipe_gets_at_most_a_hundred_columns(document: Report) -> None:
    assert max(len(line) for line in plain.render(build(document)).splitlines()) <= plain.WIDTH


def test_nothing_in_a_trace_can_steer_the_reader_s_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (plain.render(build(hostile_report())), on_terminal(hostile_report(), monkeypatch)):
        own_styles = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", own_styles)
        assert "[bold red]" in own_styles
        assert "\\x1b]0;owned" in re.sub(r"[\n│ ]+", "", own_styles)


def test_a_terminal_gets_a_box_and_the_same_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(report(), monkeypatch))
    assert text.startswith("╭")
    for fact in ("verdict", "why", "next", "GS101 double-averaging", "0.0016892", "reduce avg over group [0, 1]"):
        assert fact in text


def test_where_another_explanation_fits_as_well_the_experiment_comes_with_the_fix() -> None:
    factor = Factor(observed=0.5, expression="1/dp", candidates=[Candidate(expression="1/accum", value=0.5)])
    alone = Factor(observed=0.5, expression="1/dp", candidates=[Candidate(expression="1/dp", value=0.5)])
    for one, first in ((factor, True), (alone, False)):
        told = build(report([finding(factor=one, fix="Sum.", suggested_experiment="run with accum=3")]))
        assert told.next == ("Sum. But first: run with accum=3" if first else "Sum.")
        (facts,) = (words.facts for words in told.findings)
        assert ("also explained by 1/accum = 0.5" in facts) is first
        assert facts[-1] == f"{'to tell apart' if first else 'to learn more'}: run with accum=3"


def test_what_a_narrow_terminal_folds_stays_below_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    told = finding(consequence="Optimizer: " + "word " * 40)
    judged = report([told], coverage=Coverage(problems=["torn " * 30]))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(judged, monkeypatch, columns=60)).splitlines()
    assert max(map(len, lines)) <= 60
    folded = [line for line in lines if line.strip().startswith(("word", "torn"))]
    assert len(folded) > 4 and all(line.startswith("    ") for line in folded)


def test_a_pull_request_comment_begins_with_the_verdict_and_has_one_open_table() -> None:
    text = markdown.render(report())
    assert text.startswith(f"{markdown.MARK}\n\n### ❌ gradcheck: FOUND GS101 double-averaging")
    opened = re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    assert len(re.findall(r"^\|---", opened, re.M)) == 1
    assert "| data rank 0 | **0.5** (0.0016892 of 1/296)" in opened
    told = ("**Where** `gradcheck_dist/errors.py:9  reduce avg", "```text", "**Why**", "**Next**", "| data rank 0")
    places = [opened.find(part) for part in told]
    assert places == sorted(places) and -1 not in places  # the line and its source before all words
    assert "class GradcheckError" in opened


def test_a_pull_request_comment_fits_whatever_the_run() -> None:
    started = time.perf_counter()
    text = markdown.render(huge_report())
    assert len(text.encode()) < 60_000
    assert text.count("<details>") == text.count("</details>")
    assert "left out for size" in text
    assert time.perf_counter() - started < 20


def test_a_scenario_s_comment_fits_too() -> None:
    variants = [
        VariantReport(variant=f"v{i}", expected_finding=None, report=huge_report(), as_expected=True) for i in range(3)
    ]
    document = ScenarioReport(tool=Tool(version="0"), scenario="s", as_expected=True, variants=variants)
    text = markdown.render_scenario(document)
    assert len(text.encode()) < 60_000
    assert all(f"<summary>v{i}</summary>" in text for i in range(3))


def test_hostile_names_are_inert_in_a_pull_request() -> None:
    text = markdown.render(hostile_report())
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.S)
    assert "<img" not in outside_code
    assert not re.search(r"@\w", outside_code)
    assert not re.search(r"(?<!&)#\d", outside_code)
    assert "://" not in outside_code
    assert not re.search(r"(?<!\\)(!\[|\]\()", outside_code)
    assert not re.search(r"^# heading", text, re.M)


@pytest.mark.parametrize("value", ["a", "`", "``x`", "a`b``c", " "])
def test_a_code_span_holds_any_backticks(value: str) -> None:
    span = markdown.code(value)
    fence = re.match("`+", span)
    assert fence
    assert span.endswith(fence[0])
    assert fence[0] not in re.findall("`+", span[len(fence[0]) : -len(fence[0])])


def test_prose_keeps_code_spans_and_nothing_else() -> None:
    assert markdown.text("use `no_sync()` & *never* <b>") == "use `no_sync()` &amp; \\*never\\* &lt;b\\>"


def test_one_weight_is_no_plural() -> None:
    one = report([], [weight(0, 0, 1.0)])
    assert "1 observed weight in 2 of 2 parameters agrees with the expected one; the largest" in build(one).why
    one.verdict, one.reasons = "undetermined", ["nobody knows"]
    assert "1 observed weight in 2 of 2 parameters was compared; the largest" in build(one).why


def test_recording_exactly_is_no_probe_that_could_not_hook() -> None:
    missing = [MissingProbe(probe="exact", reason="gradients were replaced"), MissingProbe(probe="fsdp", reason="old")]
    lines = coverage_lines(report(coverage=Coverage(probes_missing=missing)))
    assert "--exact: gradients were replaced" in lines
    assert "probes that could not hook: fsdp (old)" in lines
    assert not any(
        "could not hook" in line for line in coverage_lines(report(coverage=Coverage(probes_missing=missing[:1])))
    )


def test_short_names_in_a_factor_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = Factor(observed=1.1, expression="num_tokens/(R * N_r)", tolerance=1e-6)
    told = (
        "in the factor: num_tokens = tokens of the step on all ranks, R = data ranks, "
        "N_r = tokens of the data rank in the step"
    )
    document = report([finding(factor=factor)])
    assert told in build(document).findings[0].facts
    for text in (plain.render(build(document)), on_terminal(document, monkeypatch)):
        assert told in " ".join(text.split())
    assert not any("in the factor" in fact for fact in build(report()).findings[0].facts)


def test_a_badly_known_weight_does_not_blur_what_others_are() -> None:
    table = build(report([], [weight(0, 0, 1.0), weight(1, 0, 0.5)], tolerance=0.6)).tables[0]
    assert table.note == "ratio from 0.5 to 1 over 2 contributions"
    assert [cell.off for _, cells in table.rows for cell in cells] == [False, True]


def test_the_weights_that_are_shown_are_those_of_the_headline() -> None:
    """Of several findings the first may be of a later step."""
    weights = [msgspec.structs.replace(weight(0, 0, 0.5), step=step) for step in (0, 1)]
    assert shown_step(report([finding(step=1), finding(step=0)], weights)) == 1


def test_of_a_second_finding_a_terminal_says_what_why_and_next_as_a_pipe_does(monkeypatch: pytest.MonkeyPatch) -> None:
    document = report([finding(), finding(code="GS303", explanation="The second reason.")])
    text = on_terminal(document, monkeypatch)
    for line in ("what     observed / expected", "why      The second reason.", "next     Let DDP sum"):
        assert line in plain.render(build(document)) and line in text
    assert "\n\n\x1b[1mcoverage" in text

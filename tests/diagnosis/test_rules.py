"""Each rule finds its own case and leaves the healthy twin alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from random_trainers import Culprit, culprit_of, global_mean, group_mean, microbatch_mean, rank_mean
from simulator import Hand, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.rules import all_rules, find_rule
from gradcheck_dist.events import ZeroGrad
from gradcheck_dist.scenarios.schema import library, load

HEALTHY = Trainer(root=global_mean(), op="sum", accumulation=3, data_ranks=2)
AVERAGING = replace(HEALTHY, op="avg", root=global_mean(2))
PIPELINE = Trainer(root=global_mean(), impl="none", data_ranks=1, stages=2, microbatches=2, accumulation=3)
FOUR = replace(AVERAGING, data_ranks=4, root=global_mean(4))
HEADINGS = ("## What it does", "## Why it matters", "## Example", "## Fix", "## References")

CASES = {
    "GS101": (AVERAGING, replace(AVERAGING, root=global_mean())),
    "GS102": (HEALTHY, replace(HEALTHY, sync="every")),
    "GS103": (HEALTHY, replace(HEALTHY, sync="never")),
    "GS104": (AVERAGING, replace(AVERAGING, own_divide=(("norm.weight", 4.0),))),
    "GS201": (PIPELINE, replace(PIPELINE, scale_grads=True, root=global_mean(2))),
    "GS301": (AVERAGING, replace(AVERAGING, root=microbatch_mean(2))),
    "GS302": (AVERAGING, replace(AVERAGING, root=rank_mean(2))),
    "GS303": (HEALTHY, replace(HEALTHY, root=global_mean(3))),
    "GS304": (replace(HEALTHY, auxiliary=global_mean(0.01)), replace(HEALTHY, auxiliary=global_mean(0.03))),
    "GS305": (FOUR, replace(FOUR, root=group_mean(2, 4))),
    "GS401": (HEALTHY, replace(HEALTHY, zero_between=True)),
    "GS501": (HEALTHY, replace(HEALTHY, hands=(Hand("before_optimizer", 0.0317),))),
    "GS000": (HEALTHY, replace(HEALTHY, hands=(Hand("before_step", 1.7),))),
}

ELSEWHERE = {
    "GS105": "diagnosis/test_unlike.py",
    "GS106": "diagnosis/test_unlike.py",
    "GS107": "probes/test_unlike_updates.py",
    "GS202": "probes/test_stage_edges.py",
    "GS203": "probes/test_stage_edges.py",
    "GS204": "probes/test_stage_edges.py",
    "GS402": "ledger",
    "GS403": "probes/test_repeated_backward.py",
    "GS404": "probes/test_changed_places.py",
    "GS602": "probes/test_clips.py",
    "GS605": "probes/test_clips.py",
    "GS608": "probes/test_fsdp1.py",
    "GS609": "probes/test_threads.py",
    "GS702": "probes/test_clips.py",
    "GS705": "diagnosis/test_unshared_batch.py",
    "GS706": "probes/test_ties.py",
    "GS707": "probes/test_replaced_parameters.py",
    "GS708": "probes/test_stale.py",
    "GS709": "probes/test_repeated_parameters.py",
    "GS801": "verify",
    "GS802": "probes/test_exchanges.py",
    "GS803": "probes/test_loss_backward.py",
}
"""Rules that need more than a simulated step, and where they are tested."""


def judged(trainer: Trainer, seed: int = 5) -> Report:
    return diagnose(World(trainer, seed).run())


def only(report: Report) -> str:
    return " ".join(finding.code for finding in report.findings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("code", CASES)
def test_a_rule_finds_its_case_and_not_its_healthy_twin(code: str, dtype: str) -> None:
    twin, faulty = (replace(trainer, dtype=dtype) for trainer in CASES[code])
    assert only(judged(faulty)) == code
    assert judged(twin).verdict == "clean"


def test_every_rule_has_a_case_here_or_in_a_recorded_run() -> None:
    recorded = {one.code for name in library() for variant in load(name).variants for one in variant.expect}
    assert set(CASES) | recorded | set(ELSEWHERE) == {rule.CODE for rule in all_rules()}
    assert not [place for place in ELSEWHERE.values() if not (Path(__file__).parents[1] / place).exists()]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.CODE)
def test_every_rule_is_a_page_with_all_its_headings(rule: object) -> None:
    page = rule.__doc__ or ""
    assert [heading for heading in HEADINGS if heading not in page] == []
    assert page.index(HEADINGS[0]) > 0
    assert find_rule(rule.CODE) is rule  # type: ignore[attr-defined]
    assert find_rule(rule.NAME) is rule  # type: ignore[attr-defined]


def test_the_culprit_of_a_reduction_is_its_line() -> None:
    event = judged(CASES["GS101"][1]).findings[0].first_event
    assert event is not None
    assert (event.kind, event.op, event.file, event.line) == ("reduce", "avg", "train.py", 14)
    assert event.nominal_factor == pytest.approx(0.5)
    assert event.observed_factor == pytest.approx(0.5, rel=1e-4)


def test_a_division_by_another_number_than_the_ranks_is_told_as_it_is() -> None:
    (finding,) = judged(replace(FOUR, impl="fsdp", divide=2.0, root=global_mean())).findings
    assert (finding.code, finding.factor.exact) == ("GS101", "1/2")
    assert "divides its sum by 2, over 4 ranks" in finding.explanation
    assert "multiply the loss by 2 so that the division undoes it" in finding.fix


@pytest.mark.parametrize(
    ("impl", "how"),
    [
        ("fsdp", "set_gradient_divide_factor(2)"),
        ("ddp", "a communication hook that does so"),
        ("all_reduce", "op=ReduceOp.SUM, and / 2 after it"),
    ],
)
def test_a_wrong_divisor_is_mended_by_the_means_of_who_reduces(impl: str, how: str) -> None:
    (finding,) = judged(replace(AVERAGING, impl=impl, own_divide=(("norm.weight", 1.0),))).findings
    assert finding.code == "GS104"
    assert how in finding.fix


@pytest.mark.parametrize(("divides_by", "named"), [(1.0, "dp_replicate"), (4.0, "1/dp_replicate")])
def test_a_wrong_divisor_is_named_after_ranks_and_passes_that_are_as_many_are_told_apart(
    divides_by: float, named: str
) -> None:
    wrong = replace(AVERAGING, own_divide=(("norm.weight", divides_by),))
    (finding,) = judged(replace(wrong, accumulation=2)).findings
    assert (finding.code, finding.factor.expression) == ("GS104", named)
    assert "are equal in this run; to tell, run again with 3 accumulation steps" in (finding.suggested_experiment or "")
    (alone,) = judged(replace(wrong, accumulation=3)).findings
    assert (alone.factor.expression, alone.suggested_experiment) == (named, None)


def test_the_culprit_of_a_repetition_is_the_first_that_was_too_much() -> None:
    event = judged(CASES["GS102"][1]).findings[0].first_event
    assert event is not None and event.accumulation_step == 1


def test_what_nobody_recorded_lies_between_two_recorded_events() -> None:
    finding = judged(CASES["GS000"][1]).findings[0]
    assert culprit_of(finding) == Culprit("reduce", True, "optimizer_step")
    assert finding.factor.observed == pytest.approx(1.7, rel=1e-5)
    assert finding.factor.expression is None
    assert "1.7" in finding.explanation


def test_a_factor_on_one_parameter_names_this_parameter() -> None:
    hand = Hand("before_step", 1.7, params=frozenset({"norm.weight"}))
    finding = judged(replace(HEALTHY, hands=(hand,))).findings[0]
    assert (finding.units, finding.num_parameters) == (["norm.weight"], 1)


def test_where_ranks_and_accumulation_steps_are_equal_the_event_decides() -> None:
    finding = judged(replace(AVERAGING, accumulation=2, root=global_mean())).findings[0]
    assert finding.factor.expression == "1/dp_replicate"


def test_where_nothing_decides_both_names_are_told_with_an_experiment() -> None:
    finding = judged(replace(HEALTHY, accumulation=2, root=global_mean(2))).findings[0]
    names = {candidate.expression for candidate in finding.factor.candidates}
    assert {"accumulation_steps", "dp_replicate"} <= names
    assert finding.suggested_experiment is not None and "3" in finding.suggested_experiment


def test_two_faults_are_two_findings_with_their_own_factors() -> None:
    report = judged(replace(AVERAGING, root=global_mean(), hands=(Hand("before_optimizer", 2.6),)))
    factors = {finding.code: finding.factor.observed for finding in report.findings}
    assert factors == {"GS101": pytest.approx(0.5, rel=1e-3), "GS000": pytest.approx(2.6, rel=1e-3)}


@pytest.mark.parametrize("trainer", [HEALTHY, replace(AVERAGING, hands=(Hand("before_optimizer", 2.0),))])
def test_an_exact_sum_over_tokens_is_told_and_how_to_declare_it(trainer: Trainer) -> None:
    """The second as in flair, which undoes the average behind it and means the sum."""
    summing = replace(trainer, root=lambda key, tokens: 1.0)
    undeclared = World(summing, 5).run()
    for trace in undeclared.ranks.values():
        trace.header = msgspec.structs.replace(trace.header, objective=None)
    (finding,) = diagnose(undeclared).findings
    assert finding.factor.expression == "num_tokens"
    assert "Nobody declared whether that is intended" in finding.explanation
    assert "--objective sum" in finding.fix
    assert diagnose(World(summing, 5).run(), objective="sum").verdict == "clean"
    (declared,) = judged(summing).findings
    assert "sum over tokens" not in declared.explanation and "--objective" not in declared.fix


def test_what_averages_sums_that_are_meant_is_not_said_to_follow_a_division() -> None:
    averaged = replace(AVERAGING, root=lambda key, tokens: 1.0)
    (finding,) = diagnose(World(averaged, 5).run(), objective="sum").findings
    assert finding.code == "GS101" and "the whole weight that sum asks for" in finding.explanation


def test_a_constant_of_degrees_is_no_clip() -> None:
    assert only(judged(replace(HEALTHY, hands=(Hand("before_optimizer", 0.5),)))) == "GS000"


def test_a_factor_on_some_parameters_is_no_clip() -> None:
    hand = Hand("before_optimizer", 0.0317, params=frozenset({"norm.weight"}))
    assert only(judged(replace(HEALTHY, hands=(hand,)))) == "GS000"


def test_a_clip_by_hand_is_a_remark_and_no_error() -> None:
    finding = judged(CASES["GS501"][1]).findings[0]
    assert finding.severity == "warning"


def test_a_trace_without_losses_is_undetermined() -> None:
    run = World(HEALTHY).run()
    for trace in run.ranks.values():
        trace.events = [event for event in trace.events if "loss" not in type(event).__struct_config__.tag]
    assert diagnose(run).verdict == "undetermined"


def test_a_rank_whose_trace_is_missing_leaves_the_verdict_open() -> None:
    run = World(CASES["GS101"][1]).run()
    del run.ranks[1]
    report = diagnose(run)
    assert report.verdict == "undetermined"
    assert any("rank 1" in reason for reason in report.reasons)


def test_another_objective_makes_the_same_run_right() -> None:
    run = World(CASES["GS301"][1]).run()
    assert diagnose(run, objective="microbatch-mean").verdict == "clean"


def test_what_empties_gradients_unrecorded_is_named_and_its_place_is_a_gap() -> None:
    run = World(CASES["GS401"][1]).run()
    for trace in run.ranks.values():
        trace.events = [event for event in trace.events if not isinstance(event, ZeroGrad)]
    finding = diagnose(run).findings[0]
    assert finding.code == "GS401" and "nothing recorded" in finding.explanation
    assert culprit_of(finding) == Culprit("backward", True, "backward")


@pytest.mark.parametrize(
    ("beside", "codes"),
    [
        (replace(AVERAGING, root=global_mean()), {"GS401", "GS101"}),
        (replace(HEALTHY, root=global_mean(3)), {"GS401", "GS303"}),
        (replace(HEALTHY, not_reduced=frozenset({"norm.weight"})), {"GS401", "GS103"}),
    ],
)
def test_what_empties_gradients_unrecorded_is_named_beside_another_fault_too(beside: Trainer, codes: set[str]) -> None:
    """Of a contribution that was emptied nothing is left by which another hand could be measured."""
    run = World(replace(beside, zero_between=True)).run()
    for trace in run.ranks.values():
        trace.events = [event for event in trace.events if not isinstance(event, ZeroGrad)]
    assert {finding.code for finding in diagnose(run).findings} == codes


def test_a_missing_reduction_is_named_after_ranks_also_where_as_many_passes_add_up() -> None:
    finding = judged(replace(AVERAGING, sync="never", accumulation=AVERAGING.data_ranks)).findings[0]
    assert (finding.code, finding.factor.exact) == ("GS103", "2")
    assert finding.factor.expression in ("dp_replicate", "world_size")

"""Comparing a judgement with a scenario's file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sample_reports import finding, first_event, report, weight

from gradcheck_dist.axes import Axes
from gradcheck_dist.diagnosis.finding import Candidate, Factor, Report, UnitInfo
from gradcheck_dist.events import LossGradient
from gradcheck_dist.scenarios.expect import contributions_without_tokens, mismatch, published
from gradcheck_dist.scenarios.formula import Formula
from gradcheck_dist.scenarios.schema import Expectation, ExpectedCulprit
from gradcheck_dist.trainer.config import TrainConfig

CONFIG = TrainConfig(axes=Axes(dp_replicate=2), accum=3)
CLEAN: tuple[Expectation, ...] = ()
CULPRIT = ExpectedCulprit("reduce", "gradcheck_dist/errors.py", "class GradcheckError")


def expecting(ratio: str = "1/R", **more: Any) -> tuple[Expectation, ...]:
    return (Expectation("GS101", "double-averaging", Formula(ratio), CULPRIT, **more),)


def with_ratios(value: float, *, at: float | None = None) -> Report:
    cells = [weight(rank, k, value) for rank in (0, 1) for k in range(3)]
    if at is not None:
        cells[4] = weight(1, 1, at)
    return report(weights=cells)


def test_what_the_file_says_is_no_mismatch() -> None:
    assert mismatch(expecting(), report(), CONFIG) == ""
    assert mismatch(CLEAN, report([]), CONFIG) == ""


def test_a_finding_on_a_healthy_twin_is_a_mismatch() -> None:
    assert "the verdict is findings, not clean" in mismatch(CLEAN, report(), CONFIG)


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("accumulation_steps * microbatches", "accumulation_steps"),
        ("1/(accumulation_steps * microbatches)", "1/accumulation_steps"),
        ("1/(dp_replicate * accumulation_steps)", "1/(dp_replicate * accumulation_steps)"),
        ("num_tokens", "num_tokens"),
        ("1/cp", "1/cp"),
    ],
)
def test_a_factor_is_called_without_what_is_one_in_this_configuration(name: str, called: str) -> None:
    for expression in (name, called):
        found = report([finding(factor=Factor(observed=0.5, expression=expression))])
        fits = mismatch(expecting(factor=name), found, CONFIG) == ""
        assert fits is (expression == called)


def test_contributions_without_tokens_need_no_weight() -> None:
    cells = with_ratios(1.0).weights[:-1]
    clean = report([], weights=cells)
    assert "observed weights of 5 contributions, not of 6" in mismatch(CLEAN, clean, CONFIG)
    assert mismatch(CLEAN, clean, CONFIG, {0: 1}) == ""
    assert "not of 4" in mismatch(CLEAN, clean, CONFIG, {0: 2})


def test_contributions_without_tokens_are_counted_by_step() -> None:
    """A context-parallel rank has a contribution of its own, tensor-parallel ranks have one together."""

    def trace(*counts: int | None) -> Any:
        common: dict[str, Any] = {"t_ns": 0, "loss_id": 1, "microbatch": 0, "weight": 1.0}
        return SimpleNamespace(
            events=[
                LossGradient(seq=seq, step=seq % 2, accumulation_step=seq // 2, num_tokens=count, **common)
                for seq, count in enumerate(counts)
            ]
        )

    run: Any = SimpleNamespace(ranks={0: trace(3, 0, 2, 5), 1: trace(1, 0, 0, None)})
    assert contributions_without_tokens(run, TrainConfig(axes=Axes(cp=2), accum=2)) == {0: 1, 1: 2}
    assert contributions_without_tokens(run, TrainConfig(axes=Axes(tp=2), accum=2)) == {1: 1}


def test_an_undetermined_verdict_is_never_as_expected() -> None:
    unclear = report([], verdict="undetermined")
    assert mismatch(CLEAN, unclear, CONFIG)
    assert mismatch(expecting(), unclear, CONFIG)


def test_another_code_or_one_finding_too_many_is_a_mismatch() -> None:
    for findings in ([finding(code="GS000")], [finding(name="other")], [finding(), finding(code="GS102")]):
        assert "found " in mismatch(expecting(), report(findings), CONFIG)


@pytest.mark.parametrize(("ratio", "fits"), [(0.50004, True), (0.49996, True), (0.50006, False), (0.499, False)])
def test_every_weight_is_held_to_one_part_in_ten_thousand(ratio: float, fits: bool) -> None:
    assert (mismatch(expecting(), with_ratios(0.5, at=ratio), CONFIG) == "") is fits


@pytest.mark.parametrize(("ratio", "fits"), [(0.0, True), (1e-9, True), (0.01, False)])
def test_a_weight_that_must_be_zero_is_held_to_the_same_tolerance(ratio: float, fits: bool) -> None:
    assert (mismatch(expecting("0*R"), with_ratios(ratio), CONFIG) == "") is fits


def test_bfloat16_gets_its_own_tolerance() -> None:
    config = TrainConfig(axes=Axes(dp_replicate=2), accum=3, dtype="bfloat16")
    assert mismatch(expecting(), with_ratios(0.505), config) == ""
    assert mismatch(expecting(), with_ratios(0.55), config)


def test_formulas_see_tokens_step_and_rank_of_each_contribution() -> None:
    ratios = {0: 4.0, 1: 2.0, 2: 1.0}
    cells = [weight(rank, k, ratio) for rank in (0, 1) for k, ratio in ratios.items()]
    assert mismatch(expecting("R**(K-1-k)"), report(weights=cells), CONFIG) == ""
    assert mismatch(expecting("N/(R*N_r)*4/4/R"), with_ratios(0.5), CONFIG) == ""
    assert mismatch(expecting("N/(R*K*n_c)/R"), with_ratios(0.5), CONFIG) == ""


def test_formulas_know_whose_gradient_it_is() -> None:
    cells = [weight(rank, k, float(rank == 0)) for rank in (0, 1) for k in range(3)]
    assert {cell.holder_rank for cell in cells} == {0}
    assert mismatch(expecting("r == h"), report(weights=cells), CONFIG) == ""
    assert mismatch(expecting("r != h"), report(weights=cells), CONFIG)


def test_context_parallel_ranks_have_contributions_of_their_own() -> None:
    config = TrainConfig(axes=Axes(dp_shard=2, cp=2))
    cells = [weight(rank, 0, float(rank % 2 == 0)) for rank in range(4)]
    assert mismatch(expecting("r % cp == h % cp"), report(weights=cells), config) == ""


def test_several_findings_multiply_and_each_has_to_be_there() -> None:
    other = Expectation("GS102", "repeated-reduction", Formula("R**(K-1-k)"), CULPRIT)
    cells = [weight(rank, k, 0.5 * 2.0 ** (2 - k)) for rank in (0, 1) for k in range(3)]
    both = [finding(), finding(code="GS102", name="repeated-reduction")]
    assert mismatch((*expecting(), other), report(both, cells), CONFIG) == ""
    assert "found GS101" in mismatch((*expecting(), other), report(both[:1], cells), CONFIG)
    published_both = published((*expecting(), other))
    assert published_both
    assert (published_both.code, published_both.factor) == ("GS101, GS102", "1/R, R**(K-1-k)")


def test_a_finding_may_concern_some_parameters_only() -> None:
    document = with_ratios(0.5)
    document.units = [UnitInfo(unit="all parameters", parameters=["a", "b"])]
    for one in document.weights:
        one.unit = "all parameters"
    document.findings[0].num_parameters = 2
    assert mismatch(expecting(parameters=("?",)), document, CONFIG) == ""
    assert "holds parameters of a and others" in mismatch(expecting(parameters=("a",)), document, CONFIG)
    assert "concerns 2 parameters, not the 1 of a" in mismatch(expecting(parameters=("a",)), document, CONFIG)
    assert "are off" in mismatch(expecting(parameters=("c",)), document, CONFIG)


def test_the_name_of_the_factor_is_held_where_the_file_gives_one() -> None:
    named = report().findings[0].factor.expression
    assert named
    assert mismatch(expecting(factor=named), report(), CONFIG) == ""
    assert "the factor is called" in mismatch(expecting(factor="1/microbatches"), report(), CONFIG)


def test_a_factor_may_have_the_name_of_another_size_that_is_the_same_number() -> None:
    document = report()
    document.findings[0].factor.candidates = [Candidate(expression="1/pp", value=0.5)]
    assert mismatch(expecting(factor="1/pp"), document, CONFIG) == ""
    assert "the factor is called" in mismatch(expecting(factor="1/tp"), document, CONFIG)


def test_a_contribution_without_an_observed_weight_is_a_mismatch() -> None:
    cells = [weight(rank, k, 0.5 if (rank, k) != (1, 2) else None) for rank in (0, 1) for k in range(3)]
    assert "5 contributions, not of 6" in mismatch(expecting(), report(weights=cells), CONFIG)
    assert "0 of 1 steps" in mismatch(expecting(), report(weights=[]), CONFIG)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "clip"}, "is a clip, not a reduce"),
        ({"file": "gradcheck_dist/axes.py"}, "lies in gradcheck_dist/axes.py"),
        ({"line": 12}, "does not hold 'class GradcheckError'"),
        ({"file": None, "line": None}, "no file"),
    ],
)
def test_the_culprit_must_be_the_event_file_and_line_of_the_file(changes: dict[str, object], words: str) -> None:
    blamed = report([finding(first_event=first_event(**changes))])
    assert words in mismatch(expecting(), blamed, CONFIG)
    assert mismatch(expecting(), report([finding(first_event=None)]), CONFIG) == "no culprit is named"


def test_a_finding_must_name_all_steps_that_were_judged() -> None:
    config = TrainConfig(axes=Axes(dp_replicate=2), accum=3, steps=2)
    weights = [weight(rank, k, 0.5) for rank in (0, 1) for k in range(3) for _ in range(2)]
    for one in weights[::2]:
        one.step = 1
    assert mismatch(expecting(), report([finding(steps=[0, 1])], weights), config) == ""
    assert "names the steps [0], not [0, 1]" in mismatch(expecting(), report([finding()], weights), config)
    assert "1 of 2 steps have weights" in mismatch(expecting(), report(), config)


def test_a_finding_may_begin_behind_the_first_step() -> None:
    config = TrainConfig(axes=Axes(dp_replicate=2), accum=3, steps=2)
    weights = [weight(rank, k, ratio) for rank in (0, 1) for k in range(3) for ratio in (1.0, 0.5)]
    for one in weights[1::2]:
        one.step = 1
    late = expecting(from_step=1)
    assert mismatch(late, report([finding(steps=[1])], weights), config) == ""
    assert "names the steps [0, 1], not [1]" in mismatch(late, report([finding(steps=[0, 1])], weights), config)
    assert "of step 0 are off" in mismatch(expecting(), report([finding(steps=[0, 1])], weights), config)


def test_the_expectation_is_published_in_the_report() -> None:
    expected = published(expecting())
    assert expected
    assert (expected.code, expected.factor) == ("GS101", "1/R")
    assert expected.culprit == "reduce gradcheck_dist/errors.py: class GradcheckError"
    assert published(()) is None

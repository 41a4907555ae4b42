"""Comparing a judgement with a scenario's file."""

from __future__ import annotations

import pytest
from sample_reports import finding, first_event, report, weight

from gradcheck_dist.axes import Axes
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.scenarios.expect import mismatch, published
from gradcheck_dist.scenarios.formula import Formula
from gradcheck_dist.scenarios.schema import Expectation, ExpectedCulprit
from gradcheck_dist.trainer.config import TrainConfig

CONFIG = TrainConfig(axes=Axes(dp_replicate=2), accum=3)
CULPRIT = ExpectedCulprit("reduce", "gradcheck_dist/errors.py", "class GradcheckError")


def expecting(ratio: str = "1/R") -> Expectation:
    return Expectation("GS101", "double-averaging", Formula(ratio), CULPRIT)


def with_ratios(value: float, *, at: float | None = None) -> Report:
    cells = [weight(rank, k, value) for rank in (0, 1) for k in range(3)]
    if at is not None:
        cells[4] = weight(1, 1, at)
    return report(weights=cells)


def test_what_the_file_says_is_no_mismatch() -> None:
    assert mismatch(expecting(), report(), CONFIG) == ""
    assert mismatch(None, report([]), CONFIG) == ""


def test_a_finding_on_a_healthy_twin_is_a_mismatch() -> None:
    assert "the verdict is findings, not clean" in mismatch(None, report(), CONFIG)


def test_an_undetermined_verdict_is_never_as_expected() -> None:
    unclear = report([], verdict="undetermined")
    assert mismatch(None, unclear, CONFIG)
    assert mismatch(expecting(), unclear, CONFIG)


def test_another_code_or_one_finding_too_many_is_a_mismatch() -> None:
    for findings in ([finding(code="GS000")], [finding(name="other")], [finding(), finding(code="GS102")]):
        assert "found " in mismatch(expecting(), report(findings), CONFIG)


@pytest.mark.parametrize(("ratio", "fits"), [(0.50004, True), (0.49996, True), (0.50006, False), (0.499, False)])
def test_every_weight_is_held_to_one_part_in_ten_thousand(ratio: float, fits: bool) -> None:
    assert (mismatch(expecting(), with_ratios(0.5, at=ratio), CONFIG) == "") is fits


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


def test_the_expectation_is_published_in_the_report() -> None:
    expected = published(expecting())
    assert expected
    assert (expected.code, expected.factor) == ("GS101", "1/R")
    assert expected.culprit == "reduce gradcheck_dist/errors.py: class GradcheckError"
    assert published(None) is None

"""Auxiliary loss terms are judged beside the main loss: every consistent mean is right, a factor is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from random_trainers import global_mean, microbatch_mean, rank_mean
from simulator import Hand, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.losses.terms import _Fit, _simplest

COEFFICIENT = 0.01
TRAINER = Trainer(root=global_mean(), op="sum", accumulation=3, data_ranks=2, coefficient=COEFFICIENT)
Root = Callable[..., float]


def judged(trainer: Trainer) -> Report:
    return diagnose(World(trainer, 5).run())


@pytest.mark.parametrize("mean", [global_mean, microbatch_mean, rank_mean])
@pytest.mark.parametrize("factor", [1.0, 3.0, 1 / 6])
def test_a_term_may_be_any_consistent_mean_but_not_a_multiple_of_one(
    mean: Callable[[float], Root], factor: float
) -> None:
    report = judged(replace(TRAINER, auxiliary=mean(COEFFICIENT * factor)))
    if factor == 1.0:
        assert report.verdict == "clean"
        return
    (finding,) = report.findings
    assert (finding.code, finding.name) == ("GS304", "misscaled-term")
    assert finding.factor.observed == pytest.approx(factor, rel=1e-5)
    assert "balance" in finding.pattern
    assert all(weight.ratio == pytest.approx(1.0, rel=1e-4) for weight in report.weights)


def test_a_mean_over_each_microbatch_may_weigh_as_much_as_its_tokens() -> None:
    report = judged(replace(TRAINER, auxiliary=lambda key, tokens: COEFFICIENT / sum(tokens.values())))
    assert report.verdict == "clean"


def test_a_term_shares_the_convention_of_the_main_loss() -> None:
    averaging = replace(TRAINER, op="avg", root=global_mean(2), loss_scale=1.0)
    assert judged(replace(averaging, auxiliary=global_mean(2 * COEFFICIENT))).verdict == "clean"
    (finding,) = judged(replace(averaging, auxiliary=global_mean(COEFFICIENT))).findings
    assert finding.factor.observed == pytest.approx(1 / 2)


def test_without_a_declared_coefficient_only_consistency_is_judged_and_that_is_said() -> None:
    report = judged(replace(TRAINER, coefficient=None, auxiliary=global_mean(0.7)))
    assert report.verdict == "clean"
    assert any("balance" in note and "coefficient=" in note for note in report.coverage.notes)


def test_weights_that_follow_no_mean_are_not_called_right_and_not_accused() -> None:
    report = judged(replace(TRAINER, auxiliary=lambda key, tokens: COEFFICIENT * (1 + key[1]) / sum(tokens.values())))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "balance" in report.reasons[0]
    undeclared = replace(TRAINER, coefficient=None, auxiliary=lambda key, tokens: (1 + key[1]) / sum(tokens.values()))
    report = judged(undeclared)
    assert report.verdict == "clean"
    assert any("balance follow no mean" in note for note in report.coverage.notes)


def test_a_reduction_that_is_wrong_for_all_terms_accuses_no_term() -> None:
    report = judged(replace(TRAINER, op="avg", auxiliary=global_mean(COEFFICIENT)))
    assert [finding.code for finding in report.findings] == ["GS101"]


def test_a_term_and_a_reduction_that_are_both_wrong_are_both_named() -> None:
    report = judged(replace(TRAINER, op="avg", auxiliary=global_mean(3 * COEFFICIENT)))
    assert sorted(finding.code for finding in report.findings) == ["GS101", "GS304"]
    term = next(finding for finding in report.findings if finding.code == "GS304")
    assert term.factor.observed == pytest.approx(3.0)


def test_a_main_loss_that_is_wrong_accuses_no_term() -> None:
    report = judged(replace(TRAINER, root=global_mean(1 / 3), auxiliary=global_mean(COEFFICIENT)))
    assert [finding.code for finding in report.findings] == ["GS303"]


def test_a_hand_behind_the_loss_accuses_no_term() -> None:
    report = judged(replace(TRAINER, hands=(Hand("before_step", 1.7),), auxiliary=global_mean(COEFFICIENT)))
    assert [finding.code for finding in report.findings] == ["GS000"]


@pytest.mark.parametrize(("copy", "added", "chosen", "rivals"), [(1.5, 3.0, 3.0, [1.5]), (2.0, 4.0, 2.0, [4.0])])
def test_terms_of_ranks_with_the_same_data_are_read_the_simplest_way_and_the_other_is_told(
    copy: float, added: float, chosen: float, rivals: list[float]
) -> None:
    quantities = {"accumulation_steps": 3.0, "tp": 2.0, "microbatches": 4.0}
    fits = [
        _Fit("global-token-mean", adds_copies, factor, 1e-5, 100)
        for adds_copies, factor in ((False, copy), (True, added))
    ]
    best, others = _simplest(SimpleNamespace(quantities=quantities), fits)  # type: ignore[arg-type]
    assert (best.factor, [fit.factor for fit in others]) == (chosen, rivals)

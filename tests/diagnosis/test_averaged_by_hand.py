"""A line that divides by just the ranks whose gradients a reduction by hand adds up has the right number."""

from __future__ import annotations

import pytest
from random_trainers import global_mean
from simulator import Hand, Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding

RANKS, PASSES = 4, 3


def found(factor: float, divisor: float = RANKS) -> Finding:
    """Losses that ask for an average, times a factor, and sums over ranks that a line divides."""
    divided = (Hand("before_step", 1 / divisor),)
    trainer = Trainer(global_mean(RANKS * factor), data_ranks=RANKS, op="sum", accumulation=PASSES, hands=divided)
    (finding,) = diagnose(World(trainer, 1).run()).findings
    return finding


@pytest.mark.parametrize("factor", [PASSES, 1 / PASSES, 0.7])
def test_losses_that_are_off_are_told_at_the_losses(factor: float) -> None:
    finding = found(factor)
    assert finding.code == "GS303"
    assert finding.factor.observed == pytest.approx(factor, rel=1e-4)


def test_a_line_that_divides_by_another_number_is_told() -> None:
    assert found(1.0, RANKS * PASSES).code == "GS000"


def test_an_average_that_no_loss_asks_for_is_told_at_the_line() -> None:
    finding = found(1 / RANKS)
    assert finding.code == "GS000"  # the line itself was not recorded here
    assert finding.factor.observed == pytest.approx(1 / RANKS, rel=1e-4)


def test_of_bare_sums_either_may_lack_the_tokens() -> None:
    def bare(key: Key, tokens: dict[Key, int]) -> float:
        return 1.0

    divided = (Hand("before_step", 1 / RANKS),)
    trainer = Trainer(bare, data_ranks=RANKS, op="sum", accumulation=PASSES, hands=divided)
    (finding,) = diagnose(World(trainer, 1).run()).findings
    assert finding.code == "GS000"
    assert "It or the loss is to blame" in finding.explanation

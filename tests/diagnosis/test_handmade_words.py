"""What is said of gradients that are no combination of contributions any more."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gradcheck_dist.diagnosis.steps.changed_in import _until_then
from gradcheck_dist.diagnosis.weights.cells import Cell


def cell(ratio: float) -> Cell:
    return Cell((0, 0, 0), 0, Fraction(1), ratio, ratio, ratio, ratio, tolerance=1e-5, stderr=1e-8)


@pytest.mark.parametrize(
    ("ratios", "said"), [((-5e-17, 1.0), "x 0 to x 1"), ((3e-17, -2e-12), "x 0"), ((0.5, 2.0), "x 0.5 to x 2")]
)
def test_a_weight_that_is_gone_is_zero_and_no_rounding(ratios: tuple[float, float], said: str) -> None:
    told = _until_then([cell(ratio) for ratio in ratios])
    assert told == f"Up to there its weights are {said}, which what follows may make up for"

"""Counts of more tokens than enter the loss: told where whole numbers fit, and by no chance."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gradcheck_dist.diagnosis.weights.extra_counts import extra_counts
from gradcheck_dist.events import Loss
from gradcheck_dist.ledger.contributions import Contribution, Contributions


def step(tokens: list[int], weights: list[float], dtype: str = "float32") -> Contributions:
    """Contributions of two ranks with these token counts and weights, rounded as the dtype rounds."""
    result = Contributions()
    for index, (count, weight) in enumerate(zip(tokens, weights, strict=True)):
        key = (index % 2, index // 2, 0)
        loss = Loss(seq=index, t_ns=0, step=0, loss_id=index, dtype=dtype)
        result.by_key[key] = Contribution(key, (key[0],), count, float(np.float32(weight)), loss=loss)
    return result


def tokens_of(chance: random.Random, most: int) -> list[int]:
    return [chance.randint(most // 2, most) for _ in range(6)]


@pytest.mark.parametrize("most", [40, 400])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_counts_that_made_the_weights_are_found(most: int, scale: float) -> None:
    chance = random.Random(most)
    for _ in range(20):
        tokens = tokens_of(chance, most)
        extra = [chance.randint(0, 3) for _ in tokens]
        counted = sum(tokens) + sum(extra)
        weights = [scale * (n + b) / n / counted for n, b in zip(tokens, extra, strict=True)]
        found = extra_counts(step(tokens, weights))
        if any(extra):
            assert found is not None and [found[i % 2, i // 2, 0] for i in range(6)] == extra
        assert extra_counts(step(tokens, weights, "bfloat16")) is None


@pytest.mark.parametrize("num", [2, 3, 6])
@pytest.mark.parametrize("most", [12, 40, 400, 4000])
def test_weights_of_no_counts_are_fitted_by_none(num: int, most: int) -> None:
    chance = random.Random(10 * most + num)
    for _ in range(300 if most < 1000 else 30):
        tokens = tokens_of(chance, most)[:num]
        weights = [chance.uniform(0.9, 1.2) / sum(tokens) for _ in tokens]
        assert extra_counts(step(tokens, weights)) is None


def test_means_with_coefficients_of_small_whole_numbers_are_no_counts() -> None:
    """Their products with any common number would be counts."""
    chance = random.Random(1)
    for _ in range(300):
        tokens = tokens_of(chance, 40)
        weights = [chance.randint(2, 3) / n for n in tokens]
        assert extra_counts(step(tokens, weights)) is None

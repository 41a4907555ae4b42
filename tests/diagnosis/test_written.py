"""Numbers that somebody wrote, told from numbers that were computed."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_dist.diagnosis.weights.written import is_exactly_written


@pytest.mark.parametrize("factor", [0.5, 1 / 3, 0.2, 3.0, 2.0**-16, 1 / 3120, 0.125, 1024.0, 6.25, -1.0])
def test_few_digits_and_whole_divisors_are_written(factor: float) -> None:
    assert is_exactly_written(factor)


@pytest.mark.parametrize("factor", [None, 0.0, float("inf"), 0.13743, 2 / 7, 0.1 / 0.7312554, 1 / 3.0000001])
def test_other_numbers_are_not(factor: float | None) -> None:
    assert not is_exactly_written(factor)


@pytest.mark.parametrize("number", [1 / 12, 1 / 3, 0.7, 1e-4, 0.025, 1 / 4095, 1.7])
def test_numbers_that_a_tensor_rounded_are_written_too(number: float) -> None:
    assert is_exactly_written(float(np.float32(number)))


def test_a_tensors_computed_numbers_are_hardly_ever_written() -> None:
    rng = np.random.default_rng(0)
    computed = np.float32(rng.uniform(0.001, 2, 20000))
    assert sum(map(is_exactly_written, computed.tolist())) < 20

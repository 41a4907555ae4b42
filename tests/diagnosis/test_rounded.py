"""Weights that were rounded to half precision."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_dist.diagnosis.weights.rounded import rounded_to
from gradcheck_dist.ledger.solve import EPSILON


@pytest.mark.parametrize("right", [1e-9, 1 / 3, 7e4, 1e10, 1e38])
@pytest.mark.parametrize("num_tokens", [1, 7, 10**7])
def test_numbers_of_any_size_that_are_off_are_no_rounding(right: float, num_tokens: int) -> None:
    assert rounded_to(right, right * (1 + 3e-4), num_tokens) == 0


@pytest.mark.parametrize("right", [1 / 3, 1 / 1000, 123.4])
def test_a_rounded_number_is_known(right: float) -> None:
    assert rounded_to(right, float(np.float16(right)), 1) == EPSILON["float16"]
    assert rounded_to(right, float(np.float16(right * 7)) / 7, 7) == EPSILON["float16"]

"""Holds one way of computing statistics to the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from gradcheck_dist.stats import reference
from gradcheck_dist.stats.result import GradientStats

L2_ERROR = 1e-7


def assert_agrees(
    compute: Callable[..., GradientStats],
    tensors: Sequence[Tensor],
    *,
    references: Sequence[Tensor] | None = None,
    positions: Sequence[Tensor | None] | None = None,
    dot_error: float = 1e-6,
) -> None:
    """Counts, magnitudes and samples exactly; norms within 1e-7; inner products within `dot_error` of |a||b|."""
    expected = reference.gradient_stats(tensors, references=references, positions=positions)
    found = compute(tensors, references=references, positions=positions)
    np.testing.assert_array_equal(found.num_nonfinite, expected.num_nonfinite)
    np.testing.assert_array_equal(found.num_zero, expected.num_zero)
    np.testing.assert_array_equal(found.abs_max, expected.abs_max)
    np.testing.assert_array_equal(found.sample_counts, expected.sample_counts)
    np.testing.assert_array_equal(found.samples, expected.samples)
    np.testing.assert_allclose(found.l2, expected.l2, rtol=L2_ERROR, atol=0)
    if references is None:
        assert found.dot is None
        return
    assert found.dot is not None and expected.dot is not None
    norms = expected.l2 * reference.gradient_stats(references).l2
    assert (np.abs(found.dot - expected.dot) <= dot_error * norms).all(), (found.dot, expected.dot)

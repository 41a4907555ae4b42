"""By what impulse mode tells gradients apart: alike of copies, unlike of summands, on any device."""

from __future__ import annotations

import pytest
import torch

from gradcheck_dist.probes.backward.exact import FEW_BITS, told_by


@pytest.mark.parametrize("size", [1, 4, 16, 1024])
def test_copies_are_alike_and_other_gradients_are_not(size: int) -> None:
    torch.manual_seed(size)
    alike = apart = 0
    for _ in range(200):
        one = torch.randn(size)
        other = 0.9 * one + 0.4 * torch.randn(size)
        alike += int(told_by(one) == told_by(one * (1 + 1e-7 * torch.randn(size))))
        apart += int(told_by(one) != told_by(other))
    assert alike >= 199
    assert apart >= (190 if size == 1 else 200)


@pytest.mark.parametrize(
    "values",
    [torch.zeros(4), torch.tensor([float("nan"), 1.0]), torch.ones(3, dtype=torch.complex64), torch.ones(2).bfloat16()],
    ids=["zeros", "nan", "complex", "bfloat16"],
)
def test_any_values_have_a_number(values: torch.Tensor) -> None:
    assert 0 <= int(told_by(values)) < 2**FEW_BITS

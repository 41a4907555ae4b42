"""Norms alone agree with the chunked statistics, whichever way each tensor goes."""

from __future__ import annotations

import gradient_cases as cases
import numpy as np
import pytest
import torch

from gradcheck_dist.stats import cpu
from gradcheck_dist.stats.norms import SHORT, start


@pytest.mark.parametrize("dtype", [*cases.DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("make", [cases.odd_lengths, cases.planted, cases.laid_out], ids=lambda make: make.__name__)
def test_norms_and_counts_are_those_of_the_statistics(make: object, dtype: torch.dtype) -> None:
    tensors = make(dtype)  # type: ignore[operator]
    norms, counts = start(tensors).result()
    stats = cpu.gradient_stats(tensors)
    np.testing.assert_allclose(norms, stats.l2, rtol=1e-7)
    assert counts.tolist() == stats.num_nonfinite.tolist()


def test_magnitudes_whose_squares_leave_float32_are_right() -> None:
    tensors = [*cases.extreme(), torch.full((100,), 1e-25), torch.full((100,), 1e25)]
    norms, _ = start(tensors).result()
    np.testing.assert_allclose(norms, cpu.gradient_stats(tensors).l2, rtol=1e-7)


def test_a_tensor_that_torch_gets_wrong_goes_the_other_way() -> None:
    torch.manual_seed(0)
    large = torch.randn(1 << 24)
    assert large.numel() > SHORT
    exact = float(large.double().norm())
    assert abs(float(large.norm()) / exact - 1) > 1e-5
    assert float(start([large]).result()[0][0]) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("num_elements", [255, 4096, SHORT, SHORT + 1, 65_536, 262_144])
@pytest.mark.parametrize("largest", [1.0, 1e4, 1e5])
def test_one_large_element_hides_none_of_the_others(num_elements: int, largest: float) -> None:
    tensor = torch.ones(num_elements)
    tensor[num_elements // 3] = largest
    exact = float(tensor.double().norm())
    for given in (tensor, tensor.reshape(-1, num_elements // 5 or 1) if num_elements % 5 == 0 else tensor, -tensor):
        assert float(start([given]).result()[0][0]) == pytest.approx(exact, rel=1e-7)


def test_many_tensors_lie_beside_each_other() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(size) * size for size in [0, 1, 255, 256, 257, SHORT, 0, SHORT, 5] * 20]
    norms, counts = start(tensors).result()
    np.testing.assert_allclose(norms, [float(tensor.double().norm()) for tensor in tensors], rtol=1e-7)
    assert not counts.any()


def test_no_tensors_have_no_norms() -> None:
    norms, counts = start([]).result()
    assert norms.shape == counts.shape == (0,)

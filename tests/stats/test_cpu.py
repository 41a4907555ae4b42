"""Statistics on the CPU agree with their definition, whatever the sizes, layouts and values."""

from __future__ import annotations

import math
from collections.abc import Callable

import gradient_cases as cases
import numpy as np
import pytest
import torch
from stats_agreement import assert_agrees

from gradcheck_dist.stats import cpu, reference


@pytest.mark.parametrize("dtype", [*cases.DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("make", [cases.odd_lengths, cases.planted, cases.laid_out], ids=lambda make: make.__name__)
def test_all_statistics_agree_with_the_definition(make: Callable, dtype: torch.dtype) -> None:
    tensors = make(dtype)
    assert_agrees(
        cpu.CpuStats(), tensors, references=cases.references_of(tensors), positions=cases.positions_of(tensors)
    )
    assert_agrees(cpu.CpuStats(), tensors)


def test_magnitudes_whose_squares_leave_float32_are_right() -> None:
    tensors = cases.extreme()
    assert_agrees(cpu.CpuStats(), tensors, references=[torch.ones_like(tensor) for tensor in tensors])


def test_references_with_infinities_and_huge_values_agree() -> None:
    tensors = cases.odd_lengths(torch.float32)
    references = cases.references_of(tensors)
    for reference_ in references[3:]:
        reference_[1] = float("inf")
        reference_[2] = 1e30
    assert_agrees(cpu.CpuStats(), tensors, references=references)


def test_an_empty_list_gives_empty_columns() -> None:
    stats = cpu.gradient_stats([])
    assert len(stats) == 0 and stats.samples.shape == (0,) and stats.total_l2 == 0.0


def test_one_overflow_does_not_hide_the_norm_of_the_rest() -> None:
    gradient = torch.ones(10_000)
    gradient[77] = float("inf")
    stats = cpu.gradient_stats([gradient])
    assert stats.num_nonfinite.tolist() == [1]
    assert stats.l2[0] == pytest.approx(math.sqrt(9_999), rel=1e-7)


def test_small_elements_beside_a_large_one_are_not_lost() -> None:
    """In float32 each square is below half a unit in the last place of the largest one."""
    gradient = torch.full((1 << 20,), 1.7e-4)
    gradient[::256] = 1.0
    assert_agrees(cpu.CpuStats(), [gradient])


def test_samples_are_told_apart_by_tensor() -> None:
    gradients = [torch.arange(5.0), torch.arange(10.0, 20.0)]
    stats = cpu.gradient_stats(gradients, positions=[torch.tensor([4, 0]), torch.tensor([9])])
    assert stats.samples_of(0).tolist() == [4.0, 0.0]
    assert stats.samples_of(1).tolist() == [19.0]


def test_gradients_are_read_without_being_changed_or_kept() -> None:
    gradient = torch.randn(9000, requires_grad=True)
    before = gradient.detach().clone()
    version = gradient._version
    cpu.gradient_stats([gradient])
    assert torch.equal(gradient, before) and gradient._version == version


def test_norms_do_not_depend_on_the_number_of_threads() -> None:
    gradients = [torch.randn(300_000)]
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(cpu.gradient_stats(gradients).l2[0])
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


def relative_error(num_elements: int) -> float:
    generator = torch.Generator().manual_seed(num_elements)
    gradient = torch.randn(num_elements, generator=generator)
    exact = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    return abs(float(cpu.gradient_stats([gradient]).l2[0]) / exact - 1)


@pytest.mark.parametrize("num_elements", [1, 100, 4095, 65_536, 1 << 20, 1 << 24])
def test_a_norm_is_right_at_any_size(num_elements: int) -> None:
    assert relative_error(num_elements) <= 1e-7


@pytest.mark.slow
def test_a_norm_is_right_at_67_million_elements() -> None:
    assert relative_error(1 << 26) <= 1e-7


@pytest.mark.parametrize("compute", [cpu.gradient_stats, reference.gradient_stats], ids=["cpu", "reference"])
def test_what_cannot_be_read_is_named(compute: Callable) -> None:
    with pytest.raises(ValueError, match=r"tensor 1 is .*int64"):
        compute([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    with pytest.raises(ValueError, match="1 references for 2 tensors"):
        compute([torch.ones(2), torch.ones(2)], references=[torch.ones(2)])
    with pytest.raises(ValueError, match="must agree"):
        compute([torch.ones(2)], references=[torch.ones(3)])


def test_the_definition_is_what_numpy_says() -> None:
    values = np.array([3.0, -4.0, 0.0, np.nan, np.inf], dtype=np.float32)
    stats = reference.gradient_stats([torch.from_numpy(values)], references=[torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])])
    assert (stats.l2[0], stats.abs_max[0], stats.num_nonfinite[0], stats.num_zero[0]) == (5.0, 4.0, 2, 1)
    assert stats.dot is not None and stats.dot[0] == -5.0

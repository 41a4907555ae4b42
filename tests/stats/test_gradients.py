"""The door to the statistics: the right way for each device and type, and the same answers by all of them."""

from __future__ import annotations

from collections.abc import Callable

import gradient_cases as cases
import pytest
import torch
from stats_agreement import assert_agrees

from gradcheck_dist.stats import eager, gradients
from gradcheck_dist.stats.result import GradientStats


def by_torch(*args: object, **kwargs: object) -> GradientStats:
    return eager.start(*args, **kwargs).result()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [*cases.DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("make", [cases.odd_lengths, cases.planted, cases.laid_out], ids=lambda make: make.__name__)
def test_without_triton_the_answers_are_the_same(make: Callable, dtype: torch.dtype) -> None:
    tensors = make(dtype)
    assert_agrees(by_torch, tensors, references=cases.references_of(tensors), positions=cases.positions_of(tensors))


def test_an_empty_list_is_no_error() -> None:
    assert len(by_torch([])) == 0
    assert len(gradients.start([]).result()) == 0


def test_a_cpu_needs_no_triton() -> None:
    pending = gradients.start([torch.ones(4)])
    assert pending.ready and pending.result().l2.tolist() == [2.0]
    assert pending.result() is pending.result()
    assert gradients.implementation("cpu") == "numpy"

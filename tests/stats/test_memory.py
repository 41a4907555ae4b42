"""What is read where it lies is what torch reads, and whatever lies otherwise is left to torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradcheck_dist.stats import cpu, memory, norms


def test_elements_are_read_where_they_lie() -> None:
    tensors = [torch.randn(7), torch.randn(0), torch.randn(5, 40)[1:]]
    sizes = [tensor.numel() for tensor in tensors]
    found = memory.addresses(tensors, sizes)
    assert found is not None
    for tensor, address, size in zip(tensors, found, sizes, strict=True):
        assert memory.stretch(address, size).tolist() == tensor.flatten().tolist()


def test_elements_of_several_tensors_are_gathered_where_they_lie() -> None:
    tensors = [torch.randn(7), torch.randn(0), torch.randn(5, 40)[1:]]
    indices = [np.array([6, 0, 3]), np.array([], dtype=np.int64), np.array([159])]
    found = memory.addresses(tensors, [tensor.numel() for tensor in tensors])
    assert found is not None
    values = memory.gather(found, np.array([len(one) for one in indices]), np.concatenate(indices))
    assert values.tolist() == [tensors[0][6], tensors[0][0], tensors[0][3], tensors[2].flatten()[159]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 4).t()[1:],
        torch.ones(1).expand(8),
        torch.ones(4, device="meta"),
        torch.ones(4).to_sparse(),
        torch._neg_view(torch.ones(4)),
        torch._efficientzerotensor(4),
        torch.nn.Parameter(torch.ones(4)),
        torch.ones(4, dtype=torch.float64),
    ],
    ids=["strided", "expanded", "meta", "sparse", "negative", "zero", "a class of its own", "another type"],
)
def test_what_lies_otherwise_is_left_to_torch(tensor: Tensor) -> None:
    plain = torch.ones(4)
    assert memory.addresses([plain, tensor], [4, tensor.numel()]) is None


def test_another_number_of_elements_or_freed_memory_is_not_read() -> None:
    tensor = torch.ones(16)
    assert memory.addresses([tensor], [15]) is None
    tensor.untyped_storage().resize_(0)
    assert memory.addresses([tensor], [16]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_a_flat_array_has_the_elements_in_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    negative = [torch._neg_view(tensor)] if dtype.is_floating_point else []
    for given in (tensor, tensor.t(), tensor[:, 1:], tensor[:0], torch.ones(1, dtype=dtype).expand(5), *negative):
        assert memory.flat(given).tolist() == given.flatten().tolist()


def test_a_flat_array_keeps_its_tensor_alive() -> None:
    tensor = torch.arange(100_000, dtype=torch.float32)
    array = memory.flat(tensor.view(100, -1))
    del tensor
    spoilt = [torch.full((100_000,), -1.0) for _ in range(20)]
    assert len(spoilt) == 20
    assert np.array_equal(array, np.arange(100_000, dtype=np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("num_elements", [10, 5_000, 300_000])
def test_what_was_read_can_still_be_freed_and_grown(num_elements: int, dtype: torch.dtype) -> None:
    tensor = torch.ones(num_elements, dtype=dtype)
    norms.start([tensor]).result()
    cpu.gradient_stats([tensor], references=[tensor], positions=[torch.tensor([1])])
    tensor.resize_(2 * num_elements)
    tensor.untyped_storage().resize_(0)

"""Reading tensors where they lie on the host, without leaving a mark on them.

`Tensor.numpy()` marks a storage as not resizable for the rest of its life (torch/csrc/utils/tensor_numpy.cpp): a
trainer that later frees or grows what was read would fail. The DLPack view does not, but takes longer than the norm of
a small tensor; for many of them addresses are asked of tensors that the caller holds, checked, used at once and
forgotten: none is kept from one call to the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FIRST = 64
"""Where the address space begins for numpy, which takes address 0 for none."""
_dtype, _is_cpu = attrgetter("dtype"), attrgetter("is_cpu")


class _AllMemory:
    """The address space as one array. Only a method of it is kept, so that nobody prints it while looking for an
    error."""

    __array_interface__: dict[str, Any] = {
        "data": (_FIRST, True), "shape": (2**60,), "typestr": np.dtype(np.float32).str, "version": 3,
    }  # fmt: skip


_memory = np.asarray(_AllMemory()) if sys.maxsize > 2**32 else None
_float32: Callable[[slice], np.ndarray] | None = None if _memory is None else _memory.__getitem__
_take: Callable[[np.ndarray], np.ndarray] | None = None if _memory is None else _memory.take
del _memory


def addresses(tensors: Sequence[Tensor], sizes: list[int]) -> list[int] | None:
    """Where the elements of float32 tensors begin; None unless all are plain, contiguous ones on the host that have
    these numbers of elements. Hold the tensors for as long as the addresses are used."""
    if _float32 is None:
        return None
    try:
        if (
            set(map(type, tensors)) <= {Tensor}
            and set(map(_dtype, tensors)) <= {torch.float32}
            and all(map(_is_cpu, tensors))
            and all(map(Tensor.is_contiguous, tensors))
            and not any(map(Tensor.is_neg, tensors))  # their data have the other sign
            and list(map(Tensor.numel, tensors)) == sizes
        ):
            found = list(map(Tensor.data_ptr, tensors))
            # Freed storage begins at 0, and no element lies at half an item's size.
            if not any(size and (not one or one % 4) for one, size in zip(found, sizes, strict=True)):
                return found
    except RuntimeError:  # a layout or a wrapper (functorch's) that has no such thing
        pass
    return None


def stretch(address: int, num_elements: int) -> np.ndarray:
    """float32 elements from an address on that `addresses` gave. The tensor must outlive what is returned."""
    assert _float32 is not None
    begin = (address - _FIRST) // 4
    return _float32(slice(begin, begin + num_elements))


def gather(found: list[int], counts: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """float32 elements of tensors at addresses that `addresses` gave: `counts[i]` of the i-th, at the next so many of
    `indices`."""
    assert _take is not None
    begins = (np.array(found, dtype=np.int64) - _FIRST) >> 2
    return _take(begins.repeat(counts) + indices)


def flat(tensor: Tensor) -> np.ndarray:
    """All elements of a tensor on the host in one dimension, of a type that numpy has: where they lie if that can be,
    else a copy."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor._is_zerotensor():
        try:
            return np.from_dlpack(tensor.view(-1))
        except (BufferError, RuntimeError, TypeError):  # a type or a class that DLPack does not know
            pass
    found: np.ndarray = tensor.flatten().clone().resolve_neg().numpy()
    return found

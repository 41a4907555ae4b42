"""Tensors inside of arguments and results, and what two ranks can compare of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

NUM_SAMPLES = 512
SAME = 1e-5
"""Relative difference of fingerprints below which two ranks hold the same tensor."""


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all floating tensors inside of a result: tuples, mappings, dataclasses, whatever depth."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield "", value
    elif isinstance(value, Mapping):
        yield from _named(value.items())
    elif isinstance(value, list | tuple):
        yield from _named(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _named((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _named(items: Any) -> Iterator[tuple[str, Tensor]]:
    for key, part in items:
        for name, tensor in tensors_of(part):
            yield f"{key}.{name}" if name else str(key), tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor replaced; containers that torch's pytree does not know keep theirs."""
    return tree_map_only(Tensor, function, value)


def frozen(tensor: Tensor) -> Tensor:
    """A copy that nobody changes behind our back; asks for a gradient where the original did."""
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this rank holds."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def dense(tensor: Tensor) -> Tensor:
    """A tensor as it is, a sparse gradient (of an embedding) as a plain one."""
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def sample(tensor: Tensor) -> Tensor:
    """At most NUM_SAMPLES elements at fixed places of the local part, float64, shape (n,), on its device; of complex
    numbers both parts are elements."""
    flat = dense(local(tensor).detach()).reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    stride = max(1, -(-flat.numel() // NUM_SAMPLES))
    return flat[::stride].to(torch.float64).clone()


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A floating tensor in `dtype`, others and None as they are; complex128 goes with float64."""
    if dtype is None:
        return tensor
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def fingerprint(tensor: Tensor) -> list[float]:
    """Numbers that differ where two tensors differ, comparable between ranks within rounding."""
    values = sample(tensor).cpu()
    mixed = torch.cos(torch.arange(values.numel(), dtype=torch.float64, device="cpu") * 1.7)
    return [float(local(tensor).numel()), float(values.norm()), float((values * mixed).sum())]


def same(one: list[float] | None, other: list[float] | None) -> bool:
    """Whether two fingerprints are of one tensor."""
    if one is None or other is None or len(one) != len(other):
        return False
    scale = max(map(abs, one[1:]), default=0.0)
    return all(abs(a - b) <= SAME * scale for a, b in zip(one, other, strict=True))

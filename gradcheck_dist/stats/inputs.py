"""What may be handed to the statistics, and how it is read: locals of DTensors, detached, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each tensor, without its history.

    Raises:
        ValueError: a tensor is not a dense one of a known floating type.
    """
    found = []
    for index, tensor in enumerate(tensors):
        local: Tensor = getattr(tensor, "_local_tensor", tensor)
        if local.dtype not in DTYPES or local.layout is not torch.strided:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(
                f"tensor {index} is {local.layout} of {local.dtype}; gradient statistics read dense {names}. "
                "Leave it out, or convert it first."
            )
        if local.requires_grad:
            local = local.detach()
        # torch itself loses the sign from half to float32
        found.append(local.resolve_neg() if local.is_neg() else local)
    return found


def check_companions(
    tensors: Sequence[Tensor], references: Sequence[Tensor] | None, positions: Sequence[Any] | None
) -> None:
    """References and positions must go with the tensors, one each.

    Raises:
        ValueError: another number of them, or a reference of another shape or device.
    """
    for name, given in (("references", references), ("positions", positions)):
        if given is not None and len(given) != len(tensors):
            raise ValueError(f"{len(given)} {name} for {len(tensors)} tensors; give one for each, or None")
    for index, (tensor, reference) in enumerate(zip(tensors, references or (), strict=False)):
        if reference.shape != tensor.shape or reference.device != tensor.device:
            raise ValueError(
                f"reference {index} has shape {tuple(reference.shape)} on {reference.device}, "
                f"its tensor {tuple(tensor.shape)} on {tensor.device}; they must agree"
            )


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory without holes or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True

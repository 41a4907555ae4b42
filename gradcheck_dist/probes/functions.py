"""Tensors inside of torch.func's transforms (grad, vjp, vmap), which no probe can read."""

from __future__ import annotations

import torch
from torch import Tensor

_functorch = getattr(torch._C, "_functorch", None)
_is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a transform of torch.func stands between this tensor and its values."""
    return _is_wrapped is not None and bool(_is_wrapped(tensor))

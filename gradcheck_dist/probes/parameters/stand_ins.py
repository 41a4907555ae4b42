"""What lies in a parameter's place and is none: without values (inside of torch.func's transforms, on the meta device,
lazy ones), or computed."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

_functorch = getattr(torch._C, "_functorch", None)
_is_wrapped = getattr(_functorch, "is_functorch_wrapped_tensor", None)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a transform of torch.func stands between this tensor and its values."""
    return _is_wrapped is not None and bool(_is_wrapped(tensor))


def is_host(value: Tensor) -> bool:
    """Whether a value can be read without waiting for an accelerator."""
    return value.device.type == "cpu"


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has values of its own, side by side in memory: no DTensor, fake one or one in a transform."""
    known = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta and not is_transformed(tensor)
    return known and tensor.layout is torch.strided


def stands_in(param: Tensor) -> bool:
    """Whether a real parameter will take its place. A tensor that was computed from one (meta-learning's fast weights,
    lent to the module for a call) is none: no optimizer steps it, and it is another one in each call."""
    return param.is_meta or is_lazy(param) or is_transformed(param) or not param.is_leaf


def with_memory(params: Iterable[Tensor]) -> list[Tensor]:
    """Without those that only name their ranks' shards (torchrec's tables), and have no memory or gradient."""
    kind = getattr(sys.modules.get("torch.distributed._shard.sharded_tensor"), "ShardedTensor", None)
    return list(params) if kind is None else [param for param in params if not isinstance(param, kind)]

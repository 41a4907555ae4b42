"""What happens inside of an evaluation: which groups of ranks communicate, and how coarse the arithmetic is."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_dist.events import Site
from gradcheck_dist.verify.place import model_site

_FLOATING = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class Observer(TorchDispatchMode):
    """Collects the ranks of every collective, the line of the first, and the largest machine epsilon of any result.

    A DTensor's operation is let through first, so that its collectives are seen (as torch's CommDebugMode does).
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranks: set[int] = set()
        self.epsilon = 0.0
        self.site: Site | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            return NotImplemented
        result = func(*args, **kwargs)
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self.ranks |= ranks_of((*args, *kwargs.values()))
            self.site = self.site or model_site()
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor) and part.dtype in _FLOATING:
                self.epsilon = max(self.epsilon, epsilon_of(part.dtype, part.device))
        return result


def epsilon_of(dtype: torch.dtype, device: torch.device) -> float:
    """Machine epsilon; that of TF32 (2**-10) where float32 matrix products are rounded to it."""
    if dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-10
    return torch.finfo(dtype).eps


def ranks_of(arguments: tuple[Any, ...]) -> set[int]:
    """The ranks of the group among a collective's arguments: a group, its script object, or its name."""
    for argument in arguments:
        try:
            if isinstance(argument, dist.ProcessGroup):
                return set(dist.get_process_group_ranks(argument))
            if isinstance(argument, torch.ScriptObject):
                return set(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
            if isinstance(argument, str):
                group = c10d._resolve_process_group(argument)  # type: ignore[attr-defined, arg-type]
                return set(dist.get_process_group_ranks(group))
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError):
            continue
    return set()

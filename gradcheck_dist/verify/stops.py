"""Stop-gradients that are written: what detach, .data, .item and no_grad give, held fixed while variables change.

A derivative in which these are constants is what such code asks for. Collectives that autograd does not see are held
fixed too: what other ranks receive is a constant to it. Inside of a torch.autograd.Function nothing is held, for its
backward answers for all that its forward does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradcheck_dist.events import Site
from gradcheck_dist.function_apply import in_function
from gradcheck_dist.verify.place import model_site

WRITTEN = "detach, .data, .item or no_grad"
RECEIVED = "a collective that autograd does not see"
_NUMBERS = "aten::_local_scalar_dense"
_DETACH = "aten::detach"


class Stops:
    """`recording()` once at the point itself, then `held()` around every evaluation.

    `found` tells what was held although it would have changed: its kind, and the first line where it happened.
    `differentiates`: forward runs a backward of its own (forces from an energy). What autograd keeps for that is
    detached, too, so that it was held and should have changed.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._next = -1
        self.found: dict[str, Site | None] = {}
        self.differentiates = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._kept, self._next = [], -1
        with _Dispatched(self), _Data(self):
            yield

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._next = 0
        with _Dispatched(self), _Data(self):
            yield

    def value(self, live: Any, kind: str = WRITTEN) -> Any:
        """What a stop gives: the value itself while recording, later the one that was recorded."""
        if self._next < 0:
            self._kept.append(live.detach().clone() if isinstance(live, Tensor) else live)
            return live
        kept = self._kept[self._next]
        self._next += 1
        if kind not in self.found and not _equal(live, kept):
            self.found[kind] = model_site()
        return kept.clone() if isinstance(kept, Tensor) else kept


class _Dispatched(TorchDispatchMode):
    def __init__(self, stops: Stops) -> None:
        super().__init__()
        self._stops = stops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._stops.differentiates |= torch._C._current_graph_task_id() != -1
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            return NotImplemented
        name = func.name().partition(".")[0]
        stops = not torch.is_grad_enabled() or name in (_DETACH, _NUMBERS) or func.namespace == "c10d"
        return self._stopped(func, name, args, kwargs) if stops and not in_function() else func(*args, **kwargs)

    def _stopped(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            return func(*[self._sent(argument, value) for argument, value in _named(func, args)], **kwargs)
        result = func(*args, **kwargs)
        if name in (_DETACH, _NUMBERS):
            return self._stops.value(result)
        # Views are held where what they show was computed; writing without a gradient is also torch's own way of
        # keeping a norm above zero.
        aliases = any(argument.alias_info is not None for argument in func._schema.arguments)
        if aliases or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        return self._stops.value(result)

    def _sent(self, argument: str, value: Any) -> Any:
        """What a collective takes in, where its result lies elsewhere."""
        if not argument.startswith("input"):
            return value
        if isinstance(value, list | tuple):
            return [self._sent(argument, part) for part in value]
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return self._stops.value(value, RECEIVED) if floating else value


class _Data(TorchFunctionMode):
    def __init__(self, stops: Stops) -> None:
        super().__init__()
        self._stops = stops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.data.__get__ and not hasattr(result, "_local_tensor") and not in_function():  # type: ignore[attr-defined]
            return self._stops.value(result)
        return result


def _named(func: Any, args: Any) -> list[tuple[str, Any]]:
    return [(argument.name, value) for argument, value in zip(func._schema.arguments, args, strict=False)]


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)

"""Keeping torch.compile away from the probes' own code.

Inside a compiled function Dynamo sees every Python frame that runs: after a graph break (`loss.backward()`, a print)
also those of replaced functions and of hooks. Traced, they would be told that a compiler runs, record nothing, and cost
seconds. A frame's code can be marked so that it is run as it is (torch/_dynamo/eval_frame.py, skip_code); where such a
function is called inside of a traced one, it is traced along as before.

And Dynamo knows torch's functions by their identity, in a table that it makes once: a replaced one, or the original
when the probes are taken away, would be a stranger to it, and break graphs from then on.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import _lru_cache_wrapper, cached_property, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGE = "gradcheck_dist"
_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""torch/_dynamo/eval_frame.py, OptimizedModule.__call__."""
_marked: dict[int, CodeType] = {}
"""By id: code of a module that was imported twice is equal, and not the same."""


def keep_out() -> None:
    """Mark all code of this package that is imported by now, at some 70 microseconds a function; what is marked already
    costs nothing. A torch without such marks records of compiled trainers what they let probes run."""
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for code in _codes(module):
                frames.set_code_exec_strategy(code, strategy)


def untraced(function: F) -> F:
    """Let Dynamo break its graph where a traced function calls this one, as for what torch.compiler.disable gives, but
    without the import of Dynamo. Only for what is called where the graph breaks anyway: around optimizer.step, and an
    optimizer's zero_grad."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "gradcheck records here"  # type: ignore[attr-defined]
    return function


def known_alike(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Let Dynamo take originals, which are about to come back, for what it knows in their place; to be called before.
    Nothing is done where its table (torch/_dynamo/trace_rules.py, get_torch_obj_rule_map) is not made yet.

    Args:
        pairs: (original, what it is replaced by).
    """
    table = getattr(sys.modules.get("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", None)
    if table is None or not table.cache_info().currsize:
        return
    rules = table()
    for original, replaced in pairs:
        if replaced in rules:
            rules.setdefault(original, rules[replaced])


class QuietHooks:
    """No warning of a compiled module that global hooks are there, as long as the probes' are the only ones: they let
    a compiled module alone, and nobody can do anything about them."""

    def __init__(self) -> None:
        self._filter: Any = None

    def begin(self) -> None:
        """To be called before a global hook is registered."""
        if self._filter is None and not torch.nn.modules.module._has_any_global_hook():
            warnings.filterwarnings("ignore", message=_GLOBAL_HOOKS, category=UserWarning)
            self._filter = warnings.filters[0]

    def end(self) -> None:
        """Take the filter away, where whoever handles warnings has not done so already."""
        if self._filter is not None:
            with contextlib.suppress(ValueError):
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
            self._filter = None


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of a module's functions and methods that is not marked yet, with that of functions inside of them."""
    waiting = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, CodeType):
            if id(value) not in _marked:
                _marked[id(value)] = value
                waiting += value.co_consts
                yield value
        elif isinstance(value, type):
            if value.__module__ == module.__name__:
                waiting += vars(value).values()
        else:
            waiting += _inner(value)


def _inner(value: Any) -> list[Any]:
    """What a function, method, property or decorated function is made of."""
    if isinstance(value, FunctionType):
        return [value.__code__, getattr(value, "__wrapped__", None)]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, cached_property | partial):
        return [value.func]
    if isinstance(value, _lru_cache_wrapper):
        return [value.__wrapped__]
    return []

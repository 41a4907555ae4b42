"""Steps of optimizers that hand on to their class's parent: a subclass of AdamW that scales or reduces gradients and
then calls `super().step()`. Torch runs its hooks around the outermost step alone; what updates parameters reads later.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from gradcheck_dist.probes.recording.patching import Patches


class ParentSteps:
    """Calls `read(optimizer)` as a step that is under way hands on to that of a parent class."""

    def __init__(self, patches: Patches, read: Callable[[Optimizer], None]) -> None:
        self._patches, self._read = patches, read
        self._under_way: list[tuple[Optimizer, type]] = []
        self._watching: dict[type, Callable[..., Any]] = {}

    def is_inside(self, optimizer: Optimizer) -> bool:
        """Whether a parent's step of this optimizer is under way, around which torch may have hooks as well."""
        return any(one is optimizer for one, _ in self._under_way)

    def may_follow(self, optimizer: Optimizer) -> bool:
        """Whether what steps first calls something named step, and there is a parent's."""
        found = list(_definers(type(optimizer)))
        code = getattr(inspect.unwrap(found[0].__dict__["step"]), "__code__", None) if len(found) > 1 else None
        return code is not None and "step" in code.co_names

    def watch(self, optimizer: Optimizer) -> None:
        """To be called as a step begins: torch may have put its hooks around a parent's in the meantime."""
        for parent in list(_definers(type(optimizer)))[1:]:
            if parent.__dict__["step"] is not self._watching.get(parent):
                self._patches.replace(parent, "step", functools.partial(self._watched, parent))

    def _watched(self, parent: type, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            known = (one is optimizer and of is parent for one, of in self._under_way)
            if torch.compiler.is_compiling() or next(_definers(type(optimizer))) is parent or any(known):
                return original(optimizer, *args, **kwargs)
            self._under_way.append((optimizer, parent))
            try:
                self._read(optimizer)
                return original(optimizer, *args, **kwargs)
            finally:
                self._under_way.pop()

        self._watching[parent] = step
        return step


def _definers(kind: type) -> Iterator[type]:
    """Classes that have a step of their own, the one that is called first."""
    for one in kind.__mro__:
        if one is not Optimizer and isinstance(one.__dict__.get("step"), FunctionType):
            yield one

"""Steps of optimizers that hand on to their class's parent: a subclass of AdamW that scales or reduces gradients and
then calls `super().step()`. Torch runs its hooks around the outermost step alone; what updates parameters reads later.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch.optim import Optimizer

from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded


class ParentSteps:
    """Calls `read` as a step that is under way hands on to that of a parent class."""

    def __init__(self, recorder: Recorder, patches: Patches, read: Callable[[Recorder, Optimizer], None]) -> None:
        self._recorder, self._patches, self._read = recorder, patches, read
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
            if not enters(self._recorder, self, optimizer, parent):
                return original(optimizer, *args, **kwargs)
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self._under_way.pop()

        self._watching[parent] = step
        return step

    def enter(self, optimizer: Optimizer, parent: type) -> bool:
        """Whether the optimizer's own step is under way, and not that of this parent."""
        known = any(one is optimizer and of is parent for one, of in self._under_way)
        if known or next(_definers(type(optimizer))) is parent:
            return False
        self._read(self._recorder, optimizer)
        self._under_way.append((optimizer, parent))
        return True


@guarded("optimizer")
def enters(recorder: Recorder, parents: ParentSteps, optimizer: Optimizer, parent: type) -> bool:
    return parents.enter(optimizer, parent)


def _definers(kind: type) -> Iterator[type]:
    """Classes that have a step of their own, the one that is called first."""
    for one in kind.__mro__:
        if one is not Optimizer and isinstance(one.__dict__.get("step"), FunctionType):
            yield one

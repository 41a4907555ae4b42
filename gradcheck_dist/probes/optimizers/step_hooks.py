"""Hooks that a program lets torch run in front of an optimizer's step, to reduce, divide or clip its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim import optimizer as of_torch
from torch.utils.hooks import RemovableHandle

from gradcheck_dist.probes.recording.dynamo import untraced


class BehindHooks:
    """Calls a function when all other hooks of a step have run. Torch runs those for all optimizers first, so a hook
    that sees every optimizer stands in front of the optimizer's own. `mine` is that hook."""

    def __init__(self, mine: Callable[..., None]) -> None:
        self._mine = mine
        self._handles: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()

    def call(self, optimizer: Optimizer, read: Callable[[], None]) -> None:
        self.remove(optimizer)
        if not self.are_others(optimizer):
            read()
            return
        waiting = [read]  # a parent's step may run the optimizer's hooks again

        def hook(*_: Any) -> None:
            while waiting:
                waiting.pop()()

        self._handles[optimizer] = optimizer.register_step_pre_hook(untraced(hook))

    def remove(self, optimizer: Optimizer) -> None:
        handle = self._handles.pop(optimizer, None) if self._handles else None
        if handle is not None:
            handle.remove()

    def are_others(self, optimizer: Optimizer) -> bool:
        of_all = getattr(of_torch, "_global_optimizer_pre_hooks", {})
        return bool(getattr(optimizer, "_optimizer_step_pre_hooks", {})) or any(
            hook is not self._mine for hook in of_all.values()
        )

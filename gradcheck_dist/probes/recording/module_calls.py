"""The one global forward pre-hook of all probes that wait for a module's call.

A compiled module guards on how many global hooks there are (torch/nn/modules/module.py, `_call_impl`): each that comes
or goes has it compiled again, which takes minutes for a large one. So probes share one, and once something was compiled
it stays where it is, idle, and longer than the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradcheck_dist.compiling import compiles
from gradcheck_dist.probes.recording.dynamo import QuietHooks

Listener = Callable[[nn.Module, Sequence[Any]], None]

_listeners: list[Listener] = []
_hook: Any = None
_quiet = QuietHooks()


def listen(listener: Listener) -> Callable[[], None]:
    """Call `listener(module, given)` before every module's forward, outside of compiled code, until what is returned is
    called. The hook costs a microsecond a call of a module."""
    global _hook
    _listeners.append(listener)
    if _hook is None:
        _quiet.begin()
        _hook = register_module_forward_pre_hook(_called)

    def stop() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
        if not (_listeners or compiles()):
            remove()

    return stop


def is_free() -> bool:
    """Whether a listener more has nothing compiled again."""
    return _hook is not None or not compiles()


def remove() -> None:
    """Take the hook away, whatever was compiled."""
    global _hook
    if _hook is not None:
        _hook.remove()
        _hook = None
        _quiet.end()


def _called(module: nn.Module, given: Sequence[Any]) -> None:
    if torch.compiler.is_compiling():
        return
    for listener in tuple(_listeners):
        listener(module, given)

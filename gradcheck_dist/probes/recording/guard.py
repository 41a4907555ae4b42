"""Keeping errors of probes away from training."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch._C import _TorchDispatchModeKey

if TYPE_CHECKING:
    from gradcheck_dist.probes.recording.recorder import Recorder

F = TypeVar("F", bound=Callable[..., Any])
_is_tracing = torch._C._is_tracing  # what torch.jit.is_tracing asks
_num_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_FAKE, _PROXY = _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY


def guarded(probe: str) -> Callable[[F], F]:
    """Decorator for probe code `f(recorder, ...)`: an error is recorded and swallowed, the time is counted. In the
    capture of a CUDA graph it does not run, and neither under torch.jit.trace, which would take it for the model's, nor
    where torch.compile traces it: a graph break of ours would end a training that allows none. What runs on tensors
    without values is no training either (FakeTensorMode, in which inductor sets up its patterns on CUDA), nor what
    make_fx writes down (flex_attention without torch.compile), into which our operations would go."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or recorder.captures.under_way or _is_tracing():
                return None
            if _num_modes() and (_mode(_FAKE) is not None or _mode(_PROXY) is not None):
                return None
            start, before = time.perf_counter_ns(), recorder.probe_ns
            try:
                return function(recorder, *args, **kwargs)
            except Exception as error:
                recorder.failed(probe, error)
                return None
            finally:
                recorder.probe_ns = before + time.perf_counter_ns() - start  # with what guarded code inside took

        return cast(F, wrapper)

    return decorate


def kept_away(recorder: Recorder, probe: str, hook: Callable[..., None]) -> Callable[..., None]:
    """A hook on a tensor or on a node of the graph: what it raises would end the user's backward pass."""
    return functools.partial(_runner(probe), recorder, hook)


@functools.cache
def _runner(probe: str) -> Callable[..., None]:
    @guarded(probe)
    def run(_: Recorder, hook: Callable[..., None], *args: Any) -> None:
        hook(*args)

    return run


def hooking(
    recorder: Recorder, probe: str, apply: Callable[[ModuleType], None], trouble: str = "has no"
) -> Callable[[ModuleType], None]:
    """What puts a probe in place when a module of torch's is imported: the user's import must not fail on it."""

    def tried(module: ModuleType) -> None:
        try:
            apply(module)
        except Exception as error:
            recorder.status(probe, False, f"torch {torch.__version__} {trouble} {error}")

    return tried

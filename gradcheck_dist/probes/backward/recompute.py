"""Activation checkpointing: whether a region that is run again in backward draws the random numbers of forward.

Compared are the generators' states where the region begins, and only where it draws at all. Nothing is drawn or set
here. Regions inside of a compiled graph are not seen.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import checkpoint

from gradcheck_dist.events import Recompute
from gradcheck_dist.function_apply import application
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

States = list[Tensor]


def install(recorder: Recorder, patches: Patches) -> None:
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{name}_impl"):  # since torch 2.14
        name += "_impl"
    first = next(iter(inspect.signature(getattr(checkpoint, name)).parameters))
    if first != "fn":
        raise AttributeError(f"torch.utils.checkpoint.{name} begins with {first}")

    def watch(original: Callable[..., Generator[None]]) -> Callable[..., Generator[None]]:
        @functools.wraps(original)
        def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None]:
            region = _begun(recorder, fn)
            inner = original(fn if region is None else region.again, *args, **kwargs)
            next(inner)
            try:
                yield
            except BaseException as error:
                inner.throw(error)
                raise
            if region is not None:
                _ended(recorder, region)
            next(inner, None)

        return generator

    patches.replace(checkpoint, name, watch)

    def apply(cls: type[Function], fn: Callable[..., Any], *args: Any) -> Any:
        region = _begun(recorder, fn)
        applied = application(Function.__dict__["apply"])
        return applied(cls, fn if region is None else region.run, *args)

    checkpoint.CheckpointFunction.apply = classmethod(apply)  # type: ignore[assignment]
    patches.on_restore(lambda: delattr(checkpoint.CheckpointFunction, "apply"))


class _Region:
    """One call of a checkpointed function: `run` is called in forward and again, `again` only again."""

    def __init__(self, recorder: Recorder, fn: Callable[..., Any], step: int) -> None:
        self.recorder, self.fn, self.step = recorder, fn, step
        self.begin = random_states()
        self.draws: bool | None = None
        self.site = caller_site()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.draws is not None:
            return self.again(*args, **kwargs)
        discovery = self.recorder.discovery
        with nullcontext() if discovery is None else discovery.run_again_later():
            result = self.fn(*args, **kwargs)
        _ended(self.recorder, self)
        return result

    def again(self, *args: Any, **kwargs: Any) -> Any:
        if self.draws:
            _compare(self.recorder, self)
        return self.fn(*args, **kwargs)


def random_states() -> States:
    """The states of the generators that operations draw from by default; kept on the host, also CUDA's."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.default_generators[torch.cuda.current_device()].get_state())
    return states


def same(one: States, other: States) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@guarded("recompute")
def _begun(recorder: Recorder, fn: Callable[..., Any]) -> _Region | None:
    if recorder.suspended or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    recorder.ensure_step()
    return _Region(recorder, fn, recorder.step) if recorder.sampling else None


@guarded("recompute")
def _ended(recorder: Recorder, region: _Region) -> None:
    region.draws = not same(region.begin, random_states())


@guarded("recompute")
def _compare(recorder: Recorder, region: _Region) -> None:
    region.draws = False  # one word a region, however often it is run again
    if not recorder.sampling or recorder.step != region.step or same(region.begin, random_states()):
        return
    module = _module(region.fn)
    params = [] if module is None else [recorder.registry.find(param) for param in module.parameters()]
    infos = [info for info in params if info is not None]
    recorder.emit(Recompute, site=region.site, params=recorder.registry.param_set(infos))


def _module(fn: Any) -> nn.Module | None:
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None

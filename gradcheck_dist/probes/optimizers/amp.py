"""GradScaler: what it multiplies by, when gradients are unscaled, and steps that it skips.

A skipped step leaves its gradients where they are. What nobody empties is added to, and infinite for good.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import AmpScale, AmpUnscale
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.optimizers.params import params_of
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.deferred import stacked
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site


class Overflow:
    """The parameters whose gradients overflowed last (on an accelerator, that were unscaled last: nobody waits to see),
    and whether some were still infinite when the first pass of the step behind began: a bool tensor where they lie."""

    def __init__(self) -> None:
        self.step = -1
        self.infos: list[ParamInfo] = []
        self.asked = -1
        self.ids: set[int] = set()
        self.kept: Tensor | bool = False

    def look(self, step: int) -> None:
        """A backward pass of this step begins."""
        if not self.infos or step in (self.step, self.asked):
            return
        self.asked, infos, self.infos = step, self.infos, []
        self.ids = {info.id for info in infos}
        grads = [grad for info in infos if (grad := info.param.grad) is not None and is_plain(grad)]
        with torch.no_grad():
            self.kept = not_finite(grads) if grads else False

    def kept_of(self, step: int, infos: list[ParamInfo]) -> Tensor | bool:
        """Whether what is unscaled now was among it: another optimizer's gradients may be emptied before its own pass
        (a discriminator's, while the generator learns)."""
        mine = self.asked == step and not self.ids.isdisjoint(info.id for info in infos)
        return self.kept if mine else False


def not_finite(grads: list[Tensor]) -> Tensor:
    """Whether any of these has an element that is not finite."""
    return stacked([torch.isfinite(grad).all() for grad in grads]).all().logical_not()


def install(recorder: Recorder, patches: Patches) -> None:
    scaler = torch.amp.GradScaler
    overflow = Overflow()
    scaled_in: dict[int, int] = {}  # by scaler, the last step in which it scaled

    def watch_scale(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(self: Any, outputs: Any) -> Any:
            result = original(self, outputs)
            if self.is_enabled():
                scaled(recorder, scaled_in, self)
            return result

        return scale

    def watch_unscale(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def unscale_(self: Any, optimizer: Any) -> None:
            original(self, optimizer)
            if self.is_enabled():
                unscaled(recorder, overflow, self, optimizer)

        return unscale_

    def watch_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, optimizer, *args, **kwargs)
            recorder.end_step_if_open()
            return result

        return step

    patches.replace(scaler, "scale", watch_scale)
    patches.replace(scaler, "unscale_", watch_unscale)
    patches.replace(scaler, "step", watch_step)

    def begin(recorder: Recorder, *_: Any) -> None:
        begins(recorder, overflow)

    autograd.OPEN_LISTENERS.append(begin)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))


@guarded("amp")
def begins(recorder: Recorder, overflow: Overflow) -> None:
    overflow.look(recorder.step)


@guarded("amp")
def scaled(recorder: Recorder, scaled_in: dict[int, int], scaler: Any) -> None:
    step = recorder.step
    if not recorder.recording or recorder.upcoming_step != step or scaled_in.get(id(scaler)) == step:
        return  # where no loss of the step has been seen, something else is scaled
    scaled_in[id(scaler)] = step
    recorder.emit(AmpScale, site=caller_site(), scale=scaler._scale.detach().double())


@guarded("amp")
def read_scaled(recorder: Recorder, optimizer: Any, infos: list[ParamInfo]) -> None:
    """An optimizer steps. A fused one is given the scale of gradients that nobody has divided by it before."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if not isinstance(scale, Tensor) or not isinstance(found_inf, Tensor):
        return
    recorder.emit(
        AmpUnscale,
        site=caller_site(),
        scale=scale.detach().double().reshape(()),
        params=recorder.registry.param_set(infos),
        found_inf=found_inf.detach().reshape(()) > 0,
        in_step=True,
    )


@guarded("amp")
def unscaled(recorder: Recorder, overflow: Overflow, scaler: Any, optimizer: Any) -> None:
    if not recorder.recording:
        return
    infos = params_of(recorder, (param for group in optimizer.param_groups for param in group["params"]))
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    found_inf = stacked([value.detach().reshape(()) > 0 for value in found.values()]).any()
    recorder.emit(
        AmpUnscale,
        site=caller_site(),
        scale=scaler._scale.detach().double(),
        params=recorder.registry.param_set(infos),
        found_inf=found_inf,
        kept=overflow.kept_of(recorder.step, infos),
    )
    if not found_inf.is_cpu or found_inf:  # elsewhere nobody waits to see
        overflow.step, overflow.infos = recorder.step, infos

"""GradScaler: what it multiplies by, when gradients are unscaled, and steps that it skips."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradcheck_dist.events import AmpScale, AmpUnscale
from gradcheck_dist.probes.optimizers.params import params_of
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site


def install(recorder: Recorder, patches: Patches) -> None:
    scaler = torch.amp.GradScaler
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
                unscaled(recorder, self, optimizer)

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


@guarded("amp")
def scaled(recorder: Recorder, scaled_in: dict[int, int], scaler: Any) -> None:
    step = recorder.step
    if not recorder.recording or recorder.upcoming_step != step or scaled_in.get(id(scaler)) == step:
        return  # where no loss of the step has been seen, something else is scaled
    scaled_in[id(scaler)] = step
    recorder.emit(AmpScale, site=caller_site(), scale=scaler._scale.detach().double())


@guarded("amp")
def unscaled(recorder: Recorder, scaler: Any, optimizer: Any) -> None:
    if not recorder.recording:
        return
    infos = params_of(recorder, (param for group in optimizer.param_groups for param in group["params"]))
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    recorder.emit(
        AmpUnscale,
        site=caller_site(),
        scale=scaler._scale.detach().double(),
        params=recorder.registry.param_set(infos),
        found_inf=torch.stack([value.detach().reshape(()) > 0 for value in found.values()]).any(),
    )

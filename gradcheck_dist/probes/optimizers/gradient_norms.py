"""The norm that a trainer takes of its gradients, before it clips them by lines of its own.

What a clip divides by is the trainer's: behind an acting clip the gradient has the clip's norm, whatever stood before
it. So gradients are sampled where their norm is taken: what was wrong until then shows, and what follows is the clip
alone. `torch.nn.utils.clip_grad_norm_` and clip_grads_with_norm_ have a probe of their own (optimizer.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import BEFORE, GradientNorm, Site
from gradcheck_dist.probes.parameters.regions import Region, in_memory
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

MAX_LOOKED_UP = 1024
"""Norms of a step that are compared with where gradients lie: a trainer may take norms of whatever it likes."""


class _Taken:
    """Norms that are taken at one line, of one gradient after the other, are one event: `seq` of `step`, as long as
    nothing else is recorded. `sampled` are the parameters, by id and first element, whose gradients it shows."""

    def __init__(self) -> None:
        self.step = self.seq = -1
        self.site: Site | None = None
        self.sampled: set[tuple[int, int]] = set()
        self.num_looked_up = 0

    def open(self, recorder: Recorder, found: Sequence[Region], site: Site | None) -> int:
        mine = {(region.info.id, region.start) for region in found}
        goes_on = self.seq == recorder.last_seq and self.site == site
        if not goes_on or mine & self.sampled:
            self.seq, self.sampled, self.site = recorder.next_seq(), set(), site
        self.sampled |= mine
        return self.seq


def install(recorder: Recorder, patches: Patches) -> None:
    taken = _Taken()
    # Tensor.norm and torch.norm call the first.
    for owner, name in ((torch.linalg, "vector_norm"), (torch.linalg, "norm"), (torch, "_foreach_norm")):
        patches.replace(owner, name, functools.partial(_watch, recorder, taken))


def _watch(recorder: Recorder, taken: _Taken, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def norm(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _may_be_of_gradients(recorder):
            return original(*args, **kwargs)
        given = args[0] if args else next(iter(kwargs.values()), ())
        took(recorder, taken, given if isinstance(given, tuple | list) else (given,))
        recorder.in_norm = True  # one of these functions calls another
        try:
            return original(*args, **kwargs)
        finally:
            recorder.in_norm = False

    return norm


def _may_be_of_gradients(recorder: Recorder) -> bool:
    """Behind the first backward pass of a recorded step, outside of passes and of torch's own clips."""
    inside = recorder.suspended or recorder.in_norm or recorder.current is not None
    return bool(recorder.accumulation_step) and recorder.sampling and not inside


@guarded("gradient_norms")
def took(recorder: Recorder, taken: _Taken, tensors: Sequence[Any]) -> None:
    if taken.step != recorder.step:
        taken.step, taken.seq, taken.num_looked_up = recorder.step, -1, 0
    found: list[tuple[Region, Tensor]] = []
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.requires_grad or _is_product(recorder, tensor):
            continue
        local = getattr(tensor, "_local_tensor", tensor).detach()
        taken.num_looked_up += 1
        if local.dim() and local.layout is torch.strided and taken.num_looked_up <= MAX_LOOKED_UP:
            found += [(region, local) for region in _gradients(recorder, local)]
    if not found:
        return
    infos = list({region.info.id: region.info for region, _ in found}.values())
    site = caller_site()
    seq = taken.open(recorder, [region for region, _ in found], site)
    for region, local in found:
        recorder.sample_parts(seq, BEFORE, region.info, [region], local)
    recorder.emit(GradientNorm, seq=seq, site=site, params=recorder.registry.param_set(infos))


def _is_product(recorder: Recorder, tensor: Tensor) -> bool:
    """Whether it was made of a gradient, in whose place it is not."""
    return recorder.writes is not None and recorder.writes.multiples.product(tensor) is not None


def _gradients(recorder: Recorder, tensor: Tensor) -> list[Region]:
    """The gradients that lie in a tensor from end to end, and no optimizer of this step has read."""
    found: list[Region] = []
    for regions, buffer in recorder.places.overlapping(tensor):
        inside = in_memory(tensor, [(regions, buffer)])
        if sum(region.length for region in inside) == sum(region.length for region in regions):
            found += inside
    if not found and tensor.dim() == 1:
        found = recorder.places.by_value.regions(tensor)
    read = recorder.read.in_step(recorder.step)
    return [region for region in found if region.info.id not in read]

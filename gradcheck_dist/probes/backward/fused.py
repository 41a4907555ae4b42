"""Gradients that a backward adds to a buffer by itself: Megatron's gradient_accumulation_fusion.

The weight gradient is added to `weight.main_grad` by the matrix product that computes it, and autograd is handed
nothing or a placeholder. A contribution is then what a pass added to the buffer. The flag that says so is set by
megatron/core/tensor_parallel/layers.py and by Transformer Engine; without it, a buffer that changed on the CPU while no
gradient arrived at its parameter is taken for one. What arrives at such functions is noted beside it, for one that adds
nothing (a flag of the first pass is taken for that of each) hands over no gradient that anybody could miss.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradcheck_dist.events import LEAF, AddedByFunction
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.parameters.regions import buffer_of
from gradcheck_dist.probes.parameters.registry import LocalPlan, ParamInfo
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.deferred import stacked
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import ADDED_FLAG, BackwardPass, Recorder, guarded, kept_away

REPLACED_FLAG = "overwrite_main_grad"
"""Set by Megatron-FSDP, read by Transformer Engine: the product replaces what the buffer held, instead of adding."""


class _Buffers:
    """Samples of the buffers when a pass began. `candidates`: parameters with a buffer, as long as no gradient arrives
    at their leaf; found anew when there are more parameters than the `num_seen` of last time."""

    def __init__(self) -> None:
        self.seq = -1
        self.num_seen = 0
        self.candidates: dict[int, ParamInfo] = {}
        self.ordinary: set[int] = set()
        self.before: list[tuple[ParamInfo, LocalPlan, Tensor, Tensor]] = []

    def look(self, infos: list[ParamInfo]) -> None:
        if len(infos) != self.num_seen:
            self.num_seen = len(infos)
            fresh = (info for info in infos if info.id not in self.ordinary)
            self.candidates = {info.id: info for info in fresh if buffer_of(info) is not None}


def install(recorder: Recorder, patches: Patches) -> None:
    state = _Buffers()

    def begin(recorder: Recorder, current: BackwardPass, _roots: list[Root], _given: bool) -> None:
        opened(recorder, state, current)

    def end(recorder: Recorder, current: BackwardPass) -> None:
        closed(recorder, state, current)

    for listeners, listener in ((autograd.OPEN_LISTENERS, begin), (autograd.CLOSE_LISTENERS, end)):
        listeners.append(listener)  # type: ignore[arg-type]
        patches.on_restore(lambda owner=listeners, mine=listener: owner.remove(mine))  # type: ignore[misc]


@guarded("fused")
def opened(recorder: Recorder, state: _Buffers, current: BackwardPass) -> None:
    if state.seq == current.seq or not recorder.sampling:
        return
    state.seq, state.before = current.seq, []
    state.look(recorder.registry.infos())
    for info in state.candidates.values():
        buffer = buffer_of(info)
        found = recorder.registry.plan(info, buffer) if buffer is not None and info.active else None
        if buffer is not None and found is not None:
            state.before.append((info, found[0], buffer, buffer.detach().take(found[0].indices)))


@guarded("fused")
def closed(recorder: Recorder, state: _Buffers, current: BackwardPass) -> None:
    if state.seq != current.seq:
        return
    before, state.before = state.before, []
    ordinary: set[int] = set()
    for info, plan, buffer, values in before:
        added = getattr(info.param, ADDED_FLAG, False)
        if info.id in current.touched and not added:
            state.ordinary.add(info.id)
            ordinary.add(info.id)
            state.candidates.pop(info.id, None)
            continue
        found = buffer.detach().take(plan.indices)
        change = found - values
        if getattr(info.param, REPLACED_FLAG, False):  # where the product was applied at all
            change = torch.where(change.any(), found, change)
        if added or not is_host(change) or bool(change.any()):  # elsewhere it may be one of zeros
            current.touched[info.id] = info
            recorder.keep(current.seq, LEAF, plan, change)
    _tell(recorder, current, {one[0].id for one in before} - ordinary)


@guarded("fused")
def watch(recorder: Recorder, args: tuple[Any, ...], results: Any) -> None:
    """A function was applied: note what arrives at it, where it was given a parameter with a buffer of its own. Runs
    behind every function: kept short."""
    for arg in args:
        if isinstance(arg, Parameter) and arg.__dict__ and arg.requires_grad:
            _watch(recorder, arg, results)


def _watch(recorder: Recorder, param: Parameter, results: Any) -> None:
    info = recorder.registry.find(param) if recorder.samples_upcoming else None
    made = results[0] if isinstance(results, tuple) and results else results
    node: Any = getattr(made, "grad_fn", None)
    if info is not None and info.active and node is not None and buffer_of(info) is not None:
        node.register_prehook(kept_away(recorder, "fused", functools.partial(_arrived, recorder, info)))


def _arrived(recorder: Recorder, info: ParamInfo, grads: tuple[Tensor | None, ...]) -> None:
    current = recorder.current
    found = [grad.detach().abs().amax().float() for grad in grads if grad is not None and grad.numel()]
    if current is None or not found:
        return
    _, before = current.added_to.get(info.id, (info, found[0]))
    current.added_to[info.id] = info, torch.stack([before, *found]).amax()


def _tell(recorder: Recorder, current: BackwardPass, added: set[int]) -> None:
    """Tell what arrived at the functions of parameters that no gradient of autograd's own arrived at."""
    found = sorted((key, one) for key, one in current.added_to.items() if key in added)
    if not found:
        return
    params = recorder.registry.param_set([info for _, (info, _) in found])
    sizes = stacked([size for _, (_, size) in found])
    recorder.emit_values(AddedByFunction, sizes, current.microbatch, params=params)

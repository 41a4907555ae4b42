"""Pipeline schedules: which microbatch a backward belongs to, the schedule's scale_grads, its step.

Semantics: torch/distributed/pipelining/stage.py (backward_one_chunk, backward_weight_one_chunk, scale_grads) and
schedules.py (step). The first step of a stage runs a pass to infer metadata; its gradients are none of training's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradcheck_dist.events import AFTER, BEFORE, PipelineStep, ScaleGrads, Site
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.recording.guard import hooking
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site
from gradcheck_dist.probes.reductions import ddp

_PACKAGE = "torch.distributed.pipelining"


def install(recorder: Recorder, patches: Patches) -> None:
    def on_stage(module: ModuleType) -> None:
        base = module._PipelineStageBase
        patches.replace(base, "__init__", lambda original: _watch_init(recorder, original))
        patches.replace(base, "scale_grads", lambda original: _watch_scale(recorder, original))
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):
            patches.replace(base, name, lambda original: _watch_chunk(recorder, original))
        for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
            if name in vars(module.PipelineStage):
                patches.replace(module.PipelineStage, name, lambda original: _suspend(recorder, original))
        recorder.status("pipeline", True)

    def on_schedules(module: ModuleType) -> None:
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            patches.replace(getattr(module, name), "step", lambda original: _watch_step(recorder, original))

    for name, apply in (("stage", on_stage), ("schedules", on_schedules)):
        patches.when_imported(f"{_PACKAGE}.{name}", hooking(recorder, "pipeline", apply, trouble="differs:"))


def _watch_init(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, submodule: Any, stage_index: int, *args: Any, **kwargs: Any) -> None:
        original(self, submodule, stage_index, *args, **kwargs)
        autograd.add_root(recorder, submodule, stage_index)

    return init


def _suspend(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        recorder.suspended += 1
        try:
            return original(*args, **kwargs)
        finally:
            recorder.suspended -= 1

    return prepare


def _watch_chunk(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def backward_chunk(self: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        last = signature.bind(self, bwd_chunk_id, *args, **kwargs).arguments.get("last_backward", False)
        current = open_chunk(recorder, self, bwd_chunk_id, last)
        try:
            return original(self, bwd_chunk_id, *args, **kwargs)
        finally:
            if current is not None:
                close_chunk(recorder, current)

    return backward_chunk


@guarded("pipeline")
def open_chunk(recorder: Recorder, stage: Any, chunk: int, last: bool) -> Any:
    if last and isinstance(stage.submod, DistributedDataParallel):
        ddp.arm(recorder, stage.submod)
    current = recorder.begin_backward(microbatch=chunk, stage=stage.stage_index)
    if current is not None and recorder.pipeline_site is not None:
        current.site = recorder.pipeline_site
    if current is not None:
        inputs = inputs_of(stage, chunk)
        current.given = [one for one in inputs if isinstance(one, Tensor) and one.is_leaf and one.requires_grad]
    return current


def inputs_of(stage: Any, chunk: int) -> Sequence[Any]:
    """What a stage was given for a microbatch whose backward is to come; nothing where only its weights' is left."""
    kept = getattr(stage, "_forward_chunk_states", None)  # since torch 2.15
    if kept is None:
        return stage.fwd_cache.get(chunk, (None, ()))[1]
    return kept[chunk].input_values if chunk in kept else ()


@guarded("pipeline")
def close_chunk(recorder: Recorder, current: Any) -> None:
    try:
        for listener in autograd.CLOSE_LISTENERS:
            listener(recorder, current)
    finally:
        recorder.end_backward(current, sample_after=False)


def stage_params(recorder: Recorder, stage: Any) -> list[ParamInfo]:
    found = (recorder.registry.find(param) for param in stage.submod.parameters())
    return [info for info in found if info is not None]


def _watch_scale(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def scale_grads(self: Any, grad_scale_factor: int) -> None:
        seq = before_scale(recorder, self) if recorder.recording and grad_scale_factor != 1 else None
        original(self, grad_scale_factor)
        if seq is not None:
            after_scale(recorder, self, seq, grad_scale_factor)

    return scale_grads


@guarded("pipeline")
def before_scale(recorder: Recorder, stage: Any) -> int:
    seq = recorder.next_seq()
    recorder.sample_grads(seq, BEFORE, stage_params(recorder, stage))
    return seq


@guarded("pipeline")
def after_scale(recorder: Recorder, stage: Any, seq: int, divisor: float) -> None:
    infos = stage_params(recorder, stage)
    recorder.sample_grads(seq, AFTER, infos)
    recorder.emit(
        ScaleGrads,
        seq=seq,
        site=recorder.pipeline_site or caller_site(),
        divisor=float(divisor),
        params=recorder.registry.param_set(infos),
        stage=stage.stage_index,
        accumulation_step=recorder.accumulation_step,
    )


def _watch_step(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        opened = open_step(recorder, self)
        try:
            return original(self, *args, **kwargs)
        finally:
            if opened:
                close_step(recorder, self)

    return step


@guarded("pipeline")
def open_step(recorder: Recorder, schedule: Any) -> bool:
    if recorder.in_pipeline:
        return False
    for stage in _stages(schedule):
        if id(stage.submod) not in recorder.registry.known_modules:  # made of meta tensors, real by now
            autograd.add_root(recorder, stage.submod, stage.stage_index)
    if torch.is_grad_enabled():
        recorder.ensure_step()
    recorder.in_pipeline = True
    recorder.pipeline_site = caller_site()
    return True


@guarded("pipeline")
def close_step(recorder: Recorder, schedule: Any) -> None:
    recorder.in_pipeline = False
    site, recorder.pipeline_site = recorder.pipeline_site, None
    if not torch.is_grad_enabled():
        return
    if recorder.recording:
        _emit_step(recorder, schedule, site)
    recorder.accumulation_step += 1
    recorder.between_passes = recorder.sampling


def _emit_step(recorder: Recorder, schedule: Any, site: Site | None) -> None:
    stages = _stages(schedule)
    group = stages[0].group
    seq = recorder.next_seq()
    recorder.emit(
        PipelineStep,
        seq=seq,
        site=site,
        schedule=type(schedule).__name__,
        num_microbatches=schedule._n_microbatches,
        scale_grads=getattr(schedule, "scale_grads", None),
        group=tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)),
        stages=tuple(stage.stage_index for stage in stages),
        num_stages=stages[0].num_stages,
        accumulation_step=recorder.accumulation_step,
    )
    for stage in stages:
        recorder.sample_grads(seq, AFTER, stage_params(recorder, stage))


def _stages(schedule: Any) -> list[Any]:
    return getattr(schedule, "_stages", None) or [schedule._stage]

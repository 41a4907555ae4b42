"""Gradient clipping, by norm and by value."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import BEFORE, Clip, ClipValue
from gradcheck_dist.probes.optimizers.norms import record_norms
from gradcheck_dist.probes.optimizers.params import params_of
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.recording.deferred import number
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

CLIP_EPSILON = 1e-6
"""torch/nn/utils/clip_grad.py: coefficient = max_norm / (total_norm + 1e-6), clamped to 1."""


def install(recorder: Recorder, patches: Patches) -> None:
    # A `from torch.nn.utils import clip_grad_norm_` after attach finds these too; so do the private names of the module
    # that defines them, which trainers import for DTensors (verl), and through which clip_grad_norm_ calls itself.
    for name, watch in (
        ("clip_grad_norm_", _watch_clip),
        ("clip_grads_with_norm_", _watch_clip_with_norm),
        ("clip_grad_value_", _watch_clip_value),
    ):
        original = getattr(torch.nn.utils, name)
        replaced = watch(recorder, original)
        for module, known in product((torch.nn.utils, torch.nn.utils.clip_grad), (name, f"_{name}")):
            if getattr(module, known, None) is original:
                patches.replace(module, known, functools.partial(_take, replaced))


def _take(replaced: Callable[..., Any], _found: Callable[..., Any]) -> Callable[..., Any]:
    return replaced


@contextlib.contextmanager
def inside_clip(recorder: Recorder) -> Iterator[None]:
    """torch's clip takes norms by functions that are watched themselves."""
    recorder.in_norm = True
    try:
        yield
    finally:
        recorder.in_norm = False


def _watch_clip(recorder: Recorder, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or not recorder.recording:
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        used_up = _used_up(recorder, parameters)
        params, given = _readable(parameters)
        opened = before_clip(recorder, params)
        with inside_clip(recorder):
            total_norm = original(given, max_norm, norm_type, *args, **kwargs)
        if opened is not None:
            after_clip(recorder, *opened, max_norm, norm_type, total_norm, used_up)
        return total_norm

    return clip_grad_norm_


def _watch_clip_with_norm(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not recorder.recording or recorder.in_norm:
            return original(parameters, max_norm, total_norm, *args, **kwargs)
        params, given = _readable(parameters)
        opened = before_clip(recorder, params)
        original(given, max_norm, total_norm, *args, **kwargs)
        if opened is not None:
            after_clip(recorder, *opened, max_norm, 2.0, total_norm)
        return None

    return clip_grads_with_norm_


def _watch_clip_value(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not recorder.recording:
            return original(parameters, clip_value, *args, **kwargs)
        params, given = _readable(parameters)
        opened = before_clip(recorder, params)
        original(given, clip_value, *args, **kwargs)
        if opened is not None:
            after_clip_value(recorder, *opened, clip_value)
        return None

    return clip_grad_value_


def _readable(parameters: Any) -> tuple[list[Any], Any]:
    """(all items, what to pass on): a generator is read once and stands as a generator again for torch."""
    if isinstance(parameters, Tensor):
        return [parameters], parameters
    if iter(parameters) is not parameters:
        return list(parameters), parameters
    items = list(parameters)
    return items, (item for item in items)


@guarded("clip")
def _used_up(recorder: Recorder, parameters: Any) -> bool:
    """Whether a generator, or a filter or map over one, was read to its end before. One over nothing was not."""
    while isinstance(parameters, filter | map):
        try:
            parameters = parameters.__reduce__()[1][1]  # what it reads
        except TypeError:
            return False
    return isinstance(parameters, GeneratorType) and parameters.gi_frame is None


@guarded("clip")
def before_clip(recorder: Recorder, params: list[Tensor]) -> tuple[int, list[ParamInfo], list[Tensor]]:
    """Tensors that have no gradient and never get one (gradients that are given in their parameters' place) are none
    that a clip scales, as torch scales `.grad`."""
    recorder.between_passes = False
    if recorder.writes is not None:
        recorder.writes.multiples.confirm()
    infos = params_of(recorder, [param for param in params if param.requires_grad or param.grad is not None])
    seq = recorder.next_seq()
    record_norms(recorder, seq, infos, recorder.sample_grads(seq, BEFORE, infos))
    recorder.clipped.update(info.id for info in infos)
    return seq, infos, params


@guarded("clip")
def after_clip_value(recorder: Recorder, seq: int, infos: list[ParamInfo], _: list[Tensor], clip_value: float) -> None:
    recorder.between_passes = recorder.sampling
    params = recorder.registry.param_set(infos)
    recorder.emit(ClipValue, seq=seq, site=caller_site(), params=params, clip_value=float(clip_value))


@guarded("clip")
def after_clip(
    recorder: Recorder,
    seq: int,
    infos: list[ParamInfo],
    given: list[Tensor],
    max_norm: float,
    norm_type: float,
    total_norm: Any,
    used_up: bool | None = False,
) -> None:
    recorder.between_passes = recorder.sampling
    local = getattr(total_norm, "_local_tensor", total_norm)
    partial = any(placement.is_partial() for placement in getattr(total_norm, "placements", ()))
    norm: Any = number(local) if isinstance(local, Tensor) else float(local)
    coefficient = float(max_norm) / (norm + CLIP_EPSILON)
    recorder.emit(
        Clip,
        seq=seq,
        site=caller_site(),
        params=recorder.registry.param_set(infos),
        max_norm=float(max_norm),
        norm_type=float(norm_type),
        total_norm=norm,
        coefficient=coefficient.clamp(max=1.0) if isinstance(coefficient, Tensor) else min(coefficient, 1.0),
        partial=partial,
        norm_dtype=str(local.dtype).removeprefix("torch.") if isinstance(local, Tensor) else "",
        repeated=_given_again(infos, given),
        used_up=bool(used_up) and not given,
    )


def _given_again(infos: list[ParamInfo], given: list[Tensor]) -> tuple[int, ...]:
    """Parameters whose gradient a clip was given more than once, themselves or under another one's name: once for each
    further time."""
    grads = [grad for param in given if (grad := param.grad) is not None]
    times = Counter(map(id, grads))
    if len(times) == len(grads):
        return ()
    owned = {info.id: times[id(info.param.grad)] for info in infos if info.param.grad is not None}
    return tuple(param for param, number in owned.items() for _ in range(number - 1))

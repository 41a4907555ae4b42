"""FSDP2 (fully_shard), HSDP and replicate: the unsharded leaves, each reduction with all its factors, its result.

`foreach_reduce` (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py) is the one place through which gradients
are reduced; its divide factors are computed by `_get_gradient_divide_factors` from the same arguments, which is called
again here rather than mirrored. Its result is passed through untouched: its length changes between releases.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcheck_dist.events import AFTER, BEFORE, UNSYNCED_TOLD
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.parameters.places import Place
from gradcheck_dist.probes.parameters.regions import Region
from gradcheck_dist.probes.parameters.registry import Layout, ParamInfo
from gradcheck_dist.probes.recording.guard import hooking
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.reductions import left_unreduced
from gradcheck_dist.probes.reductions.collectives import op_name

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_HOOK = "all_reduce_hook"
_ON_THE_WAY = "_gradcheck_on_the_way"
"""Set on an FSDPParam: reductions whose result is being copied to the host."""


def install(recorder: Recorder, patches: Patches) -> None:
    def on_param(module: ModuleType) -> None:
        patches.replace(module.FSDPParam, "init_unsharded_param", lambda original: _watch_unshard(recorder, original))

    def on_group(module: ModuleType) -> None:
        patches.replace(module, "foreach_reduce", lambda original: _watch_reduce(recorder, module, original))
        patches.replace(module.FSDPParamGroup, "post_backward", lambda original: _watch_post(recorder, original))
        patches.replace(module.FSDPParamGroup, "finalize_backward", lambda original: _watch_final(recorder, original))
        recorder.status("fsdp", True)

    for name, apply in (("_fsdp_param", on_param), ("_fsdp_param_group", on_group)):
        patches.when_imported(f"{_PACKAGE}.{name}", hooking(recorder, "fsdp", apply))
    left_unreduced.install(recorder)
    for listeners, listener in ((autograd.WRAPPED_LISTENERS, find_lent), (autograd.ROOT_LISTENERS, hook_lent)):
        listeners.append(listener)
        patches.on_restore(functools.partial(listeners.remove, listener))


@guarded("fsdp")
def find_lent(recorder: Recorder, root: nn.Module) -> None:
    """What a module holds while it is unsharded (`unshard()` in front of forward) stands for its parameter."""
    for fsdp_param, lent in _lent_in(root):
        recorder.registry.lends(fsdp_param.sharded_param, lent)


@guarded("fsdp")
def hook_lent(recorder: Recorder, root: nn.Module) -> None:
    for fsdp_param, _ in _lent_in(root):
        hook_leaf(recorder, fsdp_param)


def _lent_in(root: nn.Module) -> Iterator[tuple[Any, Tensor]]:
    for module in root.modules():
        state_of: Any = getattr(module, "_get_fsdp_state", None)
        state = state_of() if state_of is not None else None
        groups = getattr(state, "_fsdp_param_groups", None)  # several since torch 2.13
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            for fsdp_param in getattr(group, "fsdp_params", ()):
                lent = getattr(fsdp_param, "_unsharded_param", None)
                if lent is not None:
                    yield fsdp_param, lent


def _watch_unshard(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init_unsharded_param(self: Any) -> None:
        original(self)
        hook_leaf(recorder, self)

    return init_unsharded_param


@guarded("fsdp")
def hook_leaf(recorder: Recorder, fsdp_param: Any) -> None:
    info = recorder.registry.find(fsdp_param.sharded_param)
    if info is not None:
        info.managed_by = "fsdp"
        lies_in(info, fsdp_param)
        recorder.discovery.hook(info, fsdp_param._unsharded_param)


def _watch_post(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def post_backward(self: Any, *unused: Any) -> None:
        current = recorder.current
        if current is not None:
            current.sync = bool(self.reduce_grads)
            current.unsynced = None if current.sync else UNSYNCED_TOLD
        recorder.fsdp_groups.add(self)  # in steps that are not recorded, too: they may leave something
        original(self, *unused)

    return post_backward


def _watch_final(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def finalize_backward(self: Any, *unused: Any) -> None:
        original(self, *unused)
        come_to_host(recorder, self)

    return finalize_backward


@guarded("fsdp")
def come_to_host(recorder: Recorder, group: Any) -> None:
    """What a group's gradients are behind a reduction, where they were on their way to the host (CPUOffloadPolicy)."""
    for fsdp_param in group.fsdp_params:
        for seq, info in fsdp_param.__dict__.pop(_ON_THE_WAY, ()):
            if fsdp_param.sharded_param.grad is not None:
                recorder.sample(seq, AFTER, info, fsdp_param.sharded_param.grad)


def _watch_reduce(recorder: Recorder, module: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)
    needed = {"fsdp_params", "unsharded_grads", "reduce_scatter_group", "all_reduce_group", "gradient_divide_factor"}
    if not needed <= set(signature.parameters):
        raise AttributeError(f"foreach_reduce({', '.join(sorted(needed - set(signature.parameters)))})")

    @functools.wraps(original)
    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or recorder.suspended:
            return original(*args, **kwargs)
        opened = before(recorder, signature, args, kwargs)
        if opened is not None and opened[2].get(_HOOK) is not None:
            bound = signature.bind(*args, **kwargs)
            bound.arguments[_HOOK] = _watch_hook(recorder, opened[2][_HOOK], opened[1], opened[2])
            args, kwargs = bound.args, bound.kwargs
        result = original(*args, **kwargs)
        if opened is not None:
            after(recorder, result, *opened)
        return result

    return foreach_reduce


def _watch_hook(
    recorder: Recorder, original: Callable[[Tensor], None], known: list[tuple[ParamInfo, Any]], call: dict[str, Any]
) -> Callable[[Tensor], None]:
    """The user's hook on what FSDP reduced, which may reduce it over other ranks before it becomes a gradient."""

    @functools.wraps(original)
    def all_reduce_hook(reduced: Tensor) -> None:
        current = recorder.current
        if current is not None:
            current.on_its_way = where_shards_lie(recorder, reduced, known, call)
        try:
            original(reduced)
        finally:
            if current is not None:
                current.on_its_way = None

    return all_reduce_hook


@guarded("fsdp")
def where_shards_lie(
    recorder: Recorder, reduced: Tensor, known: list[tuple[ParamInfo, Any]], call: dict[str, Any]
) -> Place | None:
    """Which part of what was reduced becomes whose gradient; None where it is divided or added to what is there."""
    if _factors(call, len(_ranks(call["reduce_scatter_group"])))["post_divide"] not in (None, 1):
        return None
    infos = {id(fsdp_param): info for info, fsdp_param in known}
    regions, offset = [], 0
    for fsdp_param in call["fsdp_params"]:
        info = infos.get(id(fsdp_param))
        if fsdp_param.sharded_param.grad is not None:
            return None
        if info is not None:
            regions.append(Region(info, 0, offset, fsdp_param.sharded_size.numel()))
        offset += fsdp_param.padded_sharded_param_size.numel()
    return (regions, reduced) if offset == reduced.numel() else None


@guarded("fsdp")
def before(
    recorder: Recorder, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, list[tuple[ParamInfo, Any]], dict[str, Any]] | None:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    call = dict(bound.arguments)
    seq = recorder.next_seq()
    known = []
    for fsdp_param, grad in zip(call["fsdp_params"], call["unsharded_grads"], strict=True):
        info = recorder.registry.find(fsdp_param.sharded_param)
        if info is not None:
            known.append((info, fsdp_param))
            if not recorder.sample(seq, BEFORE, info, grad, before_reduction(fsdp_param)):
                recorder.status("fsdp", False, f"layout of the unsharded gradient of {info.name} is not known")
    if recorder.current is not None:
        recorder.current.sharding = {info.id: (info, seq) for info, _ in known}
    if call["reduce_dtype"] is None:
        call["reduce_dtype"] = call["unsharded_grads"][0].dtype
    return seq, known, call


def lies_in(info: ParamInfo, fsdp_param: Any) -> None:
    """Note how a gradient that arrives at what modules compute with lies in the parameter."""
    if info.arrives_as is None and left_unreduced.is_plain(fsdp_param):
        info.arrives_as = _plain_layout(fsdp_param, fsdp_param._spmd_grad_placements)


def before_reduction(fsdp_param: Any) -> Layout | None:
    """How what FSDP is about to reduce lies in the parameter; None where it is all of it."""
    if left_unreduced.is_plain(fsdp_param):
        return _plain_layout(fsdp_param, fsdp_param._unsharded_dtensor_spec.placements)
    unsharded = fsdp_param.unsharded_param
    return Layout.of(unsharded) if hasattr(unsharded, "_local_tensor") else None


def _plain_layout(fsdp_param: Any, placements: Sequence[Any]) -> Layout:
    """That of a plain tensor. What FSDP reduces over data ranks is a contribution of each, and no part of one."""
    from torch.distributed.tensor import Replicate

    spec, reduced = fsdp_param._unsharded_dtensor_spec, fsdp_param._dp_dim_indices
    apart = tuple(Replicate() if dim in reduced else one for dim, one in enumerate(placements))
    return Layout(tuple(spec.shape), spec.mesh, apart, tuple(fsdp_param._orig_size))


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group)) if group is not None else ()


@guarded("fsdp")
def after(recorder: Recorder, result: Any, seq: int, known: list[tuple[ParamInfo, Any]], call: dict[str, Any]) -> None:
    shard, replicate = _ranks(call["reduce_scatter_group"]), _ranks(call["all_reduce_group"])
    infos = [info for info, _ in known]
    left = {info.id for info in infos}  # which no hook of the user's has reduced as soon as they were there
    if recorder.current is not None:
        left, recorder.current.sharding = set(recorder.current.sharding), {}
    all_reduced = bool(call.get("all_reduce_grads", True))
    recorder.emit_reduce(
        seq,
        infos,
        impl="hsdp" if shard and replicate else "fsdp" if shard else "replicate",
        group=shard or (dist.get_rank(),),
        replicate_group=replicate,
        all_reduced=all_reduced,
        wrapper=_wrapper(recorder, known, shard, replicate),
        dtype=str(call["reduce_dtype"]).removeprefix("torch."),
        **_factors(call, len(shard)),
    )
    if not all_reduced and replicate:
        return
    stream = result[2] if isinstance(result, tuple) and len(result) > 2 else None
    with torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else contextlib.nullcontext():
        for info, fsdp_param in known:
            if info.id not in left or fsdp_param.sharded_param.grad is None:
                continue
            if getattr(fsdp_param, "grad_offload_event", None) is not None:  # it is there when FSDP has waited for it
                fsdp_param.__dict__.setdefault(_ON_THE_WAY, []).append((seq, info))
            else:
                recorder.sample(seq, AFTER, info, fsdp_param.sharded_param.grad)


def _factors(call: dict[str, Any], shard_size: int) -> dict[str, Any]:
    """op, pre_divide, post_divide, premul and replicate_op as torch computes them from the same arguments."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    factor = call["gradient_divide_factor"]
    pre, post, shard_op, replicate_op = _get_gradient_divide_factors(
        call["reduce_scatter_group"],
        call["all_reduce_group"],
        call["reduce_dtype"],
        call["device"].type,
        factor,
        call.get("force_sum_reduction_for_comms", False),
    )
    op = op_name(shard_op)
    premul = 1.0 / factor if op == "premul_sum" else None
    if shard_size <= 1:  # no reduce-scatter: the input is copied, divided by a factor that was set
        op, premul = "sum", (1.0 / factor if factor is not None else None)
    return {
        "op": op,
        "pre_divide": pre,
        "post_divide": post,
        "premul": premul,
        "replicate_op": op_name(replicate_op) if call["all_reduce_group"] is not None else None,
    }


def _wrapper(
    recorder: Recorder, known: list[tuple[ParamInfo, Any]], shard: tuple[int, ...], replicate: tuple[int, ...]
) -> int | None:
    if not known:
        return None
    info, fsdp_param = known[0]
    if info.wrapper is None:
        module = fsdp_param._module_info.module
        name = info.name.rsplit(".", 1)[0]
        impl = "hsdp" if shard and replicate else "fsdp"
        found = recorder.registry.wrapper(module, impl, name, shard, shard_group=shard, replicate_group=replicate)
        for other, _ in known:
            other.wrapper = found
    return info.wrapper

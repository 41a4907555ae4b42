"""FSDP1 (FullyShardedDataParallel): parameters that lie in flat ones, whose gradients are reduced flat.

Autograd knows the flat parameter only: its leaf gets the gradients of all parameters in it, end to end. Where each of
them lies, unsharded and in this rank's shard, FlatParameter says. Gradients are reduced in `_post_backward_hook`
(torch/distributed/fsdp/_runtime_utils.py), with the divide factors of the wrapper.
The parameters are recorded under their own names; what the optimizer owns (the flat parameter, or with use_orig_params
this rank's part of each) are copies of their regions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcheck_dist.events import AFTER, BEFORE, LEAF, UNSYNCED_TOLD
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.optimizers.clips import after_clip, before_clip, inside_clip
from gradcheck_dist.probes.parameters.regions import Region
from gradcheck_dist.probes.parameters.registry import ParamInfo, clean_name
from gradcheck_dist.probes.recording.guard import hooking
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded
from gradcheck_dist.probes.reductions.ddp import made

PACKAGE = "torch.distributed.fsdp"
DIVIDING_HOOKS = {"allreduce_hook", "reduce_scatter_hook", "bf16_compress_hook", "fp16_compress_hook"}
"""torch/distributed/algorithms/_comm_hooks/default_hooks.py: they divide as the wrapper does without one."""


@dataclass
class Flat:
    """A flat parameter: `state` is its wrapper, `whole` what lies in it unsharded, `held` what of it lies here.
    `begun` is the last step of which a gradient arrived."""

    state: Any
    handle: Any
    infos: list[ParamInfo]
    whole: list[Region]
    held: list[Region]
    wrapper: int
    begun: int = -1

    @property
    def is_sharded(self) -> bool:
        return bool(self.handle.uses_sharded_strategy)


class Flats:
    """The flat parameters that are known, by the handle that torch keeps of each."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._of: dict[int, Flat] = {}

    def of(self, handle: Any) -> Flat | None:
        return self._of.get(id(handle))

    def find(self, root: nn.Module) -> None:
        """Make the flat parameters below a root module known, before their shards are taken for parameters."""
        for name, module in root.named_modules():
            handle = getattr(module, "_handle", None)
            if handle is not None and id(handle) not in self._of and hasattr(handle, "flat_param"):
                self._of[id(handle)] = self._new(clean_name(name), module, handle)

    def _new(self, prefix: str, state: Any, handle: Any) -> Flat:
        flat, registry = handle.flat_param, self._recorder.registry
        infos: list[ParamInfo] = []
        whole: list[Region] = []
        held: list[Region] = []
        offset = 0
        inside = zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
        for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not padding:
                fqn, shape, part = next(inside)
                owned = flat._params[len(infos)] if flat._params is not None else flat
                stand_in = nn.Parameter(torch.empty(shape, dtype=flat.dtype, device="meta"), owned.requires_grad)
                name = f"{prefix}.{clean_name(fqn)}" if prefix else clean_name(fqn)
                info = registry.add_elsewhere(name, stand_in)
                info.managed_by = "fsdp"
                infos.append(info)
                whole.append(Region(info, 0, offset, numel))
                length = part.numel_in_shard if part.in_shard else 0
                held.append(Region(info, part.intra_param_start_idx or 0, part.offset_in_shard or 0, length))
            offset += numel
        if flat._params is None:
            registry.add_copy(flat, held)
        else:
            for param, region in zip(flat._params, held, strict=True):
                registry.add_copy(param, [region._replace(offset=0)])
        if handle.uses_sharded_strategy:
            for index, (info, region) in enumerate(zip(infos, held, strict=True)):
                lies_in = flat if flat._params is None else flat._params[index]
                begin = region.offset if flat._params is None else 0
                registry.holds(info, lies_in.detach().view(-1)[begin : begin + region.length], lies_in)
        found = Flat(state, handle, infos, whole, held, self._wrapper(prefix, state, infos))
        self._recorder.discovery.hook_flat(flat, infos, functools.partial(arrived, self._recorder, found))
        return found

    def _wrapper(self, name: str, state: Any, infos: list[ParamInfo]) -> int:
        shard, replicas = groups_of(state)
        found = self._recorder.registry.wrapper(
            state, "fsdp1", name, shard, shard_group=shard, replicate_group=replicas
        )
        for info in infos:
            info.wrapper = found
        return found


def groups_of(state: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks over which a wrapper shards (NO_SHARD: reduces), and those over which it then replicates."""
    between = getattr(state, "_inter_node_pg", None)
    return (
        tuple(dist.get_process_group_ranks(state.process_group)),
        tuple(dist.get_process_group_ranks(between)) if between is not None else (),
    )


def install(recorder: Recorder, patches: Patches) -> None:
    flats = recorder.flats = Flats(recorder)

    def find(recorder: Recorder, root: nn.Module) -> None:
        flats.find(root)

    def on_runtime(module: ModuleType) -> None:
        patches.replace(module, "_post_backward_hook", lambda original: _watch_post(recorder, flats, original))

    def on_wrapper(module: ModuleType) -> None:
        wrapper = module.FullyShardedDataParallel
        patches.replace(wrapper, "__init__", lambda original: _watch_init(recorder, original))
        patches.replace(wrapper, "clip_grad_norm_", lambda original: _watch_clip(recorder, original))

    autograd.WRAPPED_LISTENERS.append(find)
    patches.on_restore(lambda: autograd.WRAPPED_LISTENERS.remove(find))
    for name, apply in (("_runtime_utils", on_runtime), ("fully_sharded_data_parallel", on_wrapper)):
        patches.when_imported(f"{PACKAGE}.{name}", hooking(recorder, "fsdp1", apply))


def _watch_init(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(recorder, self)
        original(self, *args, **kwargs)

    return init


@guarded("fsdp1")
def arrived(recorder: Recorder, flat: Flat, grad: Tensor | None) -> Tensor | None:
    """A contribution's gradients arrived, all of a flat parameter end to end."""
    current = recorder.current
    if current is None or grad is None:
        return None
    current.sync = bool(flat.state._sync_gradients)
    current.unsynced = None if current.sync else UNSYNCED_TOLD
    current.touched.update({info.id: info for info in flat.infos if info.param.requires_grad})
    if flat.begun != recorder.step:
        flat.begun = recorder.step
        _left(recorder, flat, current.seq)
    codes = _codes(recorder, current, flat, grad) if recorder.impulses is not None else None
    recorder.sample_regions(current.seq, LEAF, flat.whole, grad if codes is None else codes)
    return codes


def _left(recorder: Recorder, flat: Flat, seq: int) -> None:
    """Sample what the optimizer read in the step before and nobody emptied: FSDP adds what it reduces to it."""
    param, read = flat.handle.flat_param, recorder.read.in_step(recorder.step - 1)
    left = getattr(param, "_saved_grad_shard", None) if flat.is_sharded else param.grad
    if left is not None and read:
        regions = flat.held if flat.is_sharded else flat.whole
        copies = (copy for copy in recorder.registry.copies() if copy.id in read)
        infos = {region.info.id for copy in copies for region in copy.regions}
        told = [region for region in regions if region.info.id in infos]
        recorder.sample_regions(seq, BEFORE, told, left)


def _codes(recorder: Recorder, current: BackwardPass, flat: Flat, grad: Tensor) -> Tensor | None:
    """What is to arrive instead of the gradients, in impulse mode."""
    codes = torch.zeros_like(grad)
    for region in flat.whole:
        mine = slice(region.offset, region.offset + region.length)
        code = recorder.impulses.code(recorder, current, region.info, grad[mine])
        if code is None:
            return None
        codes[mine] = code
    return codes


def _watch_post(recorder: Recorder, flats: Flats, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def post_backward(state: Any, handle: Any, *unused: Any) -> None:
        flat = flats.of(handle) if recorder.recording and not recorder.suspended else None
        seq = before(recorder, flat) if flat is not None else None
        original(state, handle, *unused)
        if flat is not None and seq is not None:
            after(recorder, flat, seq)

    return post_backward


@guarded("fsdp1")
def before(recorder: Recorder, flat: Flat) -> int | None:
    """What is about to be reduced, in the type in which it was summed up; None where nothing will be."""
    grad = flat.handle.flat_param.grad
    if grad is None or not flat.state._sync_gradients:
        return None
    seq = recorder.next_seq()
    recorder.sample_regions(seq, BEFORE, flat.whole, grad)
    return seq


@guarded("fsdp1")
def after(recorder: Recorder, flat: Flat, seq: int) -> None:
    shard, replicas = groups_of(flat.state)
    if not flat.is_sharded:
        replicas = ()  # HYBRID_SHARD over shards of one rank: torch reduces over that rank alone
    recorder.emit_reduce(
        seq,
        flat.infos,
        impl="fsdp1" if flat.is_sharded else "fsdp1_no_shard",
        group=shard,
        replicate_group=replicas,
        replicate_op="sum" if replicas else None,
        wrapper=flat.wrapper,
        dtype=str(flat.handle._reduce_dtype).removeprefix("torch."),
        **_factors(flat.state),
    )
    stream = getattr(flat.state, "_all_reduce_stream" if replicas else "_post_backward_stream", None)
    with torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else contextlib.nullcontext():
        param = flat.handle.flat_param
        result = getattr(param, "_saved_grad_shard", None) if flat.is_sharded else param.grad
        if result is not None:
            recorder.sample_regions(seq, AFTER, flat.held if flat.is_sharded else flat.whole, result)


def _factors(state: Any) -> dict[str, Any]:
    """op, pre_divide and post_divide: the wrapper's own, or those of torch's hooks; else the hook's name."""
    hook, divides = state._comm_hook, state
    name = getattr(hook, "__qualname__", repr(hook))
    if hook is not None:
        divides = state._comm_hook_state
        module = getattr(hook, "__module__", "") or ""
        if not module.startswith("torch.") or name not in DIVIDING_HOOKS:
            return {"op": "unknown", "hook": f"{module}.{name}"}
    factors = {"pre_divide": "_gradient_predivide_factor", "post_divide": "_gradient_postdivide_factor"}
    if hook is not None:
        factors = {name: attribute.removeprefix("_") for name, attribute in factors.items()}
    return {
        "op": "sum",
        "hook": name if hook is not None else None,
        **{name: float(getattr(divides, attribute)) for name, attribute in factors.items()},
    }


def _watch_clip(recorder: Recorder, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def clip_grad_norm_(self: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        handles = getattr(self, "_all_handles", [])
        if not recorder.recording or not any(handle.uses_sharded_strategy for handle in handles):
            return original(self, max_norm, norm_type)  # which calls torch.nn.utils, where there are no shards
        opened = before_clip(recorder, list(self.parameters()))
        with inside_clip(recorder):
            total_norm = original(self, max_norm, norm_type)
        if opened is not None:
            after_clip(recorder, *opened, max_norm, norm_type, total_norm)
        return total_norm

    return clip_grad_norm_

"""Collectives that the user calls on gradients by hand, and those that a DDP communication hook calls.

Gradients are known by address: a parameter's `.grad`, a buffer that hangs on the parameter in its place (Megatron's
`main_grad`), the `.grad` of an optimizer's own copy, and flat buffers in which these lie one after the other.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import distributed_c10d

from gradcheck_dist.events import AFTER, BEFORE, WRITTEN
from gradcheck_dist.function_apply import in_function
from gradcheck_dist.probes.optimizers.writes import seen
from gradcheck_dist.probes.parameters.places import Place
from gradcheck_dist.probes.parameters.regions import Region, gradient_of, in_memory, main_grad_of
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site
from gradcheck_dist.probes.reductions import coalesced as coalescing
from gradcheck_dist.probes.reductions.awaited import Awaited
from gradcheck_dist.probes.reductions.coalesced import Coalesced
from gradcheck_dist.probes.reductions.group_names import GroupNames

LATEST = 4
"""Parameters whose gradients arrived last, of which a hook may reduce what has been accumulated."""


class _Pending:
    """A parameter whose buffer is reduced piece by piece. `outputs` are the pieces that are done; `copy_size` is
    that of the flat copy it lies in, 0 where its gradient lies there itself; `part`: only a part of it lies there."""

    def __init__(self, step: int, seq: int, how: tuple[Any, ...], copy_size: int = 0) -> None:
        self.step, self.seq, self.how, self.copy_size = step, seq, how, copy_size
        self.length, self.part = 0, False
        self.outputs: list[tuple[Region, Tensor, Any]] = []  # with what is to be waited for


def install(recorder: Recorder, patches: Patches) -> None:
    pending: dict[int, _Pending] = {}
    coalesced = coalescing.install(recorder, patches)
    awaited = Awaited(recorder, patches)
    recorder.group_names = GroupNames(recorder)

    def behind(result: Any, async_op: bool, *, held: bool = False) -> Behind:
        return Behind(coalesced, held, awaited, result if async_op else None)

    def watch_all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            if is_compiling() or not recorder.recording or recorder.suspended:
                return original(tensor, op=op, group=group, async_op=async_op)
            if recorder.current is not None:
                note_hook(recorder, op, group, tensor)
            opened = before_manual(recorder, pending, tensor, "all_reduce", op, group)
            result = original(tensor, op=op, group=group, async_op=async_op)
            if opened is not None:
                when = behind(result, async_op, held=coalesced.holds(group))
                after_manual(recorder, pending, opened, tensor, opened, when)
            return result

        return all_reduce

    def watch_reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def reduce_scatter(
            output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
        ) -> Any:
            if is_compiling() or not recorder.recording or recorder.suspended:
                return original(output, input, op=op, group=group, async_op=async_op)
            opened = before_manual(recorder, pending, input, "reduce_scatter", op, group)
            result = original(output, input, op=op, group=group, async_op=async_op)
            if opened is not None:
                low = dist.get_rank(group) * output.numel()
                parts = [region.part(low, low + output.numel()) for region in opened]
                own = [part for part in parts if part]
                when = behind(result, async_op, held=coalesced.holds(group))
                after_manual(recorder, pending, opened, output, own, when)
            return result

        return reduce_scatter

    def watch_reduce_scatter_list(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def reduce_scatter(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.recording or recorder.suspended:
                return original(*args, **kwargs)
            call = bound(recorder, signature, args, kwargs)
            opened = before_list(recorder, pending, call) if call is not None else None
            result = original(*args, **kwargs)
            for output, regions in opened or ():
                if call is not None:
                    own = [] if output is None else regions
                    after_manual(recorder, pending, regions, output, own, behind(result, call["async_op"]))
            return result

        return reduce_scatter

    def watch_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.recording or recorder.suspended:
                return original(*args, **kwargs)
            call = bound(recorder, signature, args, kwargs)
            opened = before_reduce(recorder, pending, call) if call is not None else None
            result = original(*args, **kwargs)
            if opened is not None and call is not None:
                when = behind(result, call["async_op"])
                after_manual(recorder, pending, opened, call["tensor"], opened, when)
            return result

        return reduce

    def watch_coalesced(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def all_reduce_coalesced(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.recording or recorder.suspended:
                return original(*args, **kwargs)
            call = bound(recorder, signature, args, kwargs)
            opened: list[tuple[Tensor, list[Region] | None]] = []
            if call is not None:
                tensors, op = call["tensors"], call["op"]
                for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
                    if recorder.current is not None:
                        note_hook(recorder, op, call["group"], tensor)
                    opened.append((tensor, before_manual(recorder, pending, tensor, "all_reduce", op, call["group"])))
            result = original(*args, **kwargs)
            for tensor, regions in opened:
                if regions is not None and call is not None:
                    after_manual(recorder, pending, regions, tensor, regions, behind(result, call["async_op"]))
            return result

        return all_reduce_coalesced

    def watch_broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def broadcast(*args: Any, **kwargs: Any) -> Any:
            if (recorder.own_optimizer is not None or recorder.between_passes) and not is_compiling():
                before_broadcast(recorder, signature, args, kwargs)
            return original(*args, **kwargs)

        return broadcast

    if hasattr(dist, "all_reduce_coalesced"):  # deprecated, and no longer in every torch
        _replace(patches, "all_reduce_coalesced", watch_coalesced)
    _replace(patches, "all_reduce", watch_all_reduce)
    _replace(patches, "broadcast", watch_broadcast)
    _replace(patches, "reduce", watch_reduce)
    _replace(patches, "reduce_scatter", watch_reduce_scatter_list)
    # The second is the older name; where both are, it calls the first through its module.
    names = ("reduce_scatter_single", "reduce_scatter_tensor")
    _replace(patches, next(name for name in names if hasattr(distributed_c10d, name)), watch_reduce_scatter)


def _replace(patches: Patches, name: str, watch_call: Callable[..., Any]) -> None:
    original, watch = getattr(dist, name), functools.partial(_outermost, watch_call)
    patches.replace(distributed_c10d, name, watch)
    patched = getattr(distributed_c10d, name)
    patches.replace(dist, name, lambda found: patched if found is original else watch(found))


def _outermost(watch: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that calls itself is watched once: where a mode for torch's functions is active
    (torch.set_default_device), it hands itself to that mode, which calls it by its name."""
    watched, here = watch(original), threading.local()

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or getattr(here, "inside", False):
            return original(*args, **kwargs)
        here.inside = True
        try:
            return watched(*args, **kwargs)
        finally:
            here.inside = False

    return collective


def op_name(op: Any) -> str:
    """ "sum", "avg", "premul_sum", ... of a ReduceOp."""
    return str(getattr(op, "op", op)).rsplit(".", 1)[-1].lower()


@guarded("collectives")
def bound(
    recorder: Recorder, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


def root_of(call: dict[str, Any]) -> int:
    """The global rank that a collective with a destination sends its result to."""
    if call.get("group_dst") is not None:
        return int(dist.get_global_rank(call["group"] or dist.distributed_c10d._get_default_group(), call["group_dst"]))
    return int(call["dst"] or 0)


def _channel(group: Any) -> str | None:
    """The name that ranks of a group know it by; None of the default one."""
    return None if group is None or group is dist.group.WORLD else str(group.group_name)


def _takes_part(group: Any) -> bool:
    """Whether this rank is in a group: torch warns where it is not, and does nothing."""
    return group != dist.GroupMember.NON_GROUP_MEMBER


@guarded("collectives")
def before_reduce(recorder: Recorder, pending: dict[int, _Pending], call: dict[str, Any]) -> list[Region] | None:
    how = ("reduce", call["op"], call["group"])
    return before_manual(recorder, pending, call["tensor"], *how, root=root_of(call)) if _takes_part(how[2]) else None


@guarded("collectives")
def before_broadcast(
    recorder: Recorder, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """What another rank broadcasts may be a parameter, which that rank's optimizer has updated, or a gradient."""
    call = bound(recorder, signature, args, kwargs)
    if call is None or not _takes_part(call["group"]):
        return
    by_group = call.get("group_src")
    if (dist.get_rank() == call["src"]) if by_group is None else (dist.get_rank(call["group"]) == by_group):
        return
    if recorder.own_optimizer is not None:
        recorder.own_optimizer.received(call["tensor"])
    if recorder.writes is not None and recorder.between_passes:
        seen(recorder, recorder.writes, WRITTEN, [call["tensor"]], None)


@guarded("collectives")
def before_list(
    recorder: Recorder, pending: dict[int, _Pending], call: dict[str, Any]
) -> list[tuple[Tensor | None, list[Region]]]:
    """A reduce-scatter of a list is a reduction of each tensor to another rank: with where the result will lie, None
    for those of other ranks."""
    if not _takes_part(call["group"]):
        return []
    opened: list[tuple[Tensor | None, list[Region]]] = []
    ranks = dist.get_process_group_ranks(call["group"] or dist.group.WORLD)
    for rank, tensor in zip(ranks, call["input_list"], strict=False):
        how = ("reduce_scatter", call["op"], call["group"])
        regions = before_manual(recorder, pending, tensor, *how, root=rank)
        if regions is not None:
            opened.append((call["output"] if rank == dist.get_rank() else None, regions))
    return opened


@guarded("collectives")
def note_hook(recorder: Recorder, op: Any, group: Any, tensor: Tensor) -> None:
    current = recorder.current
    if current is not None and isinstance(tensor, Tensor) and _takes_part(group) and not _of_activations():
        current.reduce_ops.add(op_name(op))
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        current.reduce_groups[ranks] = current.reduce_groups.get(ranks, 0) + tensor.numel()
        wrappers = {state.group for state in recorder.ddp_states.values()}
        if wrappers and ranks not in wrappers:
            found = recorder.places.overlapping(tensor, current.touched.values())
            regions = [region for held, _ in found for region in held]
            if not regions and tensor.dim() > 1:  # `before_manual` looks for flat copies
                regions = recorder.places.by_value.regions(tensor)
            _note(current, ranks, regions)


def _note(current: BackwardPass, ranks: tuple[int, ...], regions: Iterable[Region]) -> None:
    """A hook reduces these gradients over these ranks."""
    current.reduced_over.setdefault(ranks, {}).update({region.info.id: region.info for region in regions})


def _of_activations() -> bool:
    """Whether a function calls a collective: in its own backward, or in its forward while a block is recomputed."""
    node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return getattr(type(node), "_forward_cls", None) is not None or in_function()


def _accumulated(recorder: Recorder, tensor: Tensor) -> Iterator[Place]:
    """Where gradients lie in a tensor inside of a backward pass, for a hook of the user's that reduces what has been
    accumulated so far. What a wrapper reduces there has a probe of its own, as soon as it has the gradient."""
    current = recorder.current
    if current is None:
        return
    if current.on_its_way is not None:
        yield current.on_its_way
        return
    handed_over, sharding = current.handed_over, current.sharding
    likely = [*(info for info, _ in sharding.values()), *itertools.islice(reversed(current.touched.values()), LATEST)]
    for regions, buffer in recorder.places.overlapping(tensor, likely):
        info = regions[0].info
        held = info.param.grad is not None or main_grad_of(info) is not None
        own = info.managed_by == "ddp" if info.wrapper is not None else info.managed_by is None
        own = own or info.id in sharding
        if not info.regions and held and own and info.id not in handed_over:
            yield regions, buffer


def _number(recorder: Recorder, info: ParamInfo) -> int | None:
    """That of a reduction by hand: below the one of the wrapper that reduces in the same pass. None where no number is
    left there."""
    current = recorder.current
    if current is None or info.wrapper not in current.armed:
        return recorder.next_seq()
    return next(current.before_armed.get(info.wrapper, iter(())), None)


@guarded("collectives")
def before_manual(
    recorder: Recorder,
    pending: dict[int, _Pending],
    tensor: Tensor,
    impl: str,
    op: Any,
    group: Any,
    root: int | None = None,
) -> list[Region] | None:
    local = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(local, Tensor):  # the `.grad` of a parameter that got none: torch refuses it
        return None
    current = recorder.current
    if current is None and recorder.may_begin_empty:
        recorder.begins_empty([region.info for regions, _ in recorder.places.overlapping(local) for region in regions])
    if not (recorder.accumulation_step or current is not None or recorder.without_pass) or not _takes_part(group):
        return None
    how = (impl, op_name(op), tuple(dist.get_process_group_ranks(group or dist.group.WORLD)), root, _channel(group))
    recorder.registry.find_parts()
    opened: list[Region] = []
    begins: set[tuple[int, int]] = set()
    places = recorder.places.overlapping(local) if current is None else _accumulated(recorder, local)
    for regions, buffer in places:
        for region in in_memory(local, [(regions, buffer)]):
            info = region.info
            if (info.id, region.start) in begins:
                continue  # the same elements under another name
            begins.add((info.id, region.start))
            begun = pending.get(info.id)
            if begun is None or begun.step != recorder.step or begun.how != how:
                if (seq := _number(recorder, info)) is None:
                    continue
                begun = pending[info.id] = _Pending(recorder.step, seq, how)
                sharded = current.sharding.pop(info.id, None) if current is not None else None
                own = [part for part in regions if part.info is info]
                begun.part = sum(part.length for part in own) < info.numel
                if sharded is not None and info.param.grad is not None:
                    recorder.sample(sharded[1], AFTER, info, info.param.grad)
                elif sharded is not None:
                    recorder.sample_parts(sharded[1], AFTER, info, own, buffer)
                recorder.sample_parts(begun.seq, BEFORE, info, own, buffer)
            opened.append(region)
            if current is not None:
                current.by_hand.add(info.id)
    if not opened and (local.dim() if current is None else local.dim() == 1):  # of more dimensions are activations
        in_a_step = current is None and bool(recorder.read.in_step(recorder.step))
        scattered = len(how[2]) if impl == "reduce_scatter" and root is None else 1
        found = recorder.places.by_value.regions(local, stacked=in_a_step, scattered=scattered)
        if current is not None and any(region.info.managed_by is not None for region in found):
            _note(current, how[2], found)
            return None
        by_param: dict[int, list[Region]] = {}
        for region in found:
            by_param.setdefault(region.info.id, []).append(region)
        for parts in by_param.values():
            info = parts[0].info
            pending[info.id] = begun = _Pending(recorder.step, recorder.next_seq(), how, local.numel())
            recorder.sample_parts(begun.seq, BEFORE, info, parts, local)
            opened += parts
            if current is not None:
                current.by_hand.add(info.id)
    return opened or None


class Behind(NamedTuple):
    """When a collective's result is there: at once, when a coalescing manager is left (`held`), or when somebody has
    waited for `work`."""

    coalesced: Coalesced
    held: bool
    awaited: Awaited
    work: Any

    @property
    def now(self) -> bool:
        return self.work is None and not self.held


@guarded("collectives")
def after_manual(
    recorder: Recorder,
    pending: dict[int, _Pending],
    opened: list[Region],
    output: Tensor | None,
    regions: list[Region],
    behind: Behind,
) -> None:
    """A parameter's reduction is told when all pieces of its buffer are through."""
    for region in opened:
        pending[region.info.id].length += region.length
    if recorder.replicas is not None:
        recorder.replicas.moved -= sum(region.length for region in opened)  # gradients bring no parameters
    for region in regions:
        if output is not None:
            pending[region.info.id].outputs.append((region, output, behind.work))
    if (copied := pending[opened[0].info.id].copy_size) and behind.now and output is not None:
        recorder.places.by_value.came_out(opened, copied, output, regions)
    for region in opened:
        info = region.info
        done = pending.get(info.id)
        if done is None or done.length < _local_size(recorder, info, done.part):
            continue
        del pending[info.id]
        impl, op, group, root, channel = done.how
        in_a_step = info.id in recorder.read.in_step(recorder.step)
        if in_a_step and impl == "reduce_scatter" and root is None and output is not None and not done.outputs:
            root = group[region.offset // output.numel()]  # the rank that this optimizer updates it on
        how = {"impl": impl, "op": op, "group": group, "root": root, "channel": channel}
        recorder.emit_reduce(done.seq, [info], site=caller_site(), **how)
        for part, tensor, work in done.outputs:
            sample = functools.partial(recorder.sample_parts, done.seq, AFTER, info, [part], tensor)
            if work is None:
                behind.coalesced.afterwards(behind.held, sample)
            elif in_a_step and isinstance(work, dist.Work):
                behind.awaited.later(work, sample)


def _local_size(recorder: Recorder, info: ParamInfo, in_part: bool) -> int:
    """How many elements of a gradient lie on this rank. `in_part`: its copies may hold a part of it only."""
    local = getattr(info.param, "_local_tensor", None)
    if local is not None:
        return int(local.numel())
    held = recorder.registry.num_held(info) if in_part and gradient_of(info) is None else 0
    return held if 0 < held < info.numel else info.numel

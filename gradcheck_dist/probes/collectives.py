"""Collectives that the user calls on gradients by hand, and those that a DDP communication hook calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from gradcheck_dist.events import AFTER, BEFORE
from gradcheck_dist.probes.patching import Patches
from gradcheck_dist.probes.recorder import Recorder, guarded
from gradcheck_dist.probes.registry import ParamInfo


def install(recorder: Recorder, patches: Patches) -> None:
    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            if not recorder.recording or recorder.suspended:
                return original(tensor, op=op, group=group, async_op=async_op)
            if recorder.current is not None:
                note_hook(recorder, op)
                return original(tensor, op=op, group=group, async_op=async_op)
            opened = before_manual(recorder, tensor)
            result = original(tensor, op=op, group=group, async_op=async_op)
            if opened is not None:
                after_manual(recorder, *opened, op, group, async_op)
            return result

        return all_reduce

    original = dist.all_reduce
    patches.replace(distributed_c10d, "all_reduce", watch)
    patched = distributed_c10d.all_reduce
    patches.replace(dist, "all_reduce", lambda found: patched if found is original else watch(found))


def op_name(op: Any) -> str:
    """ "sum", "avg", "premul_sum", ... of a ReduceOp."""
    return str(getattr(op, "op", op)).rsplit(".", 1)[-1].lower()


@guarded("collectives")
def note_hook(recorder: Recorder, op: Any) -> None:
    if recorder.current is not None:
        recorder.current.reduce_ops.add(op_name(op))


@guarded("collectives")
def before_manual(recorder: Recorder, tensor: Tensor) -> tuple[int, ParamInfo] | None:
    """Only a parameter's own gradient is followed; flattened copies are left to the observed ledger."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.dim() == 0 or not recorder.accumulation_step:
        return None
    pointer = local.data_ptr()
    for info in recorder.registry.infos():
        grad = info.param.grad
        if grad is not None and getattr(grad, "_local_tensor", grad).data_ptr() == pointer:
            if local.numel() != getattr(grad, "_local_tensor", grad).numel():
                return None
            seq = recorder.next_seq()
            recorder.sample_grads(seq, BEFORE, [info])
            return seq, info
    return None


@guarded("collectives")
def after_manual(recorder: Recorder, seq: int, info: ParamInfo, op: Any, group: Any, async_op: bool) -> None:
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    recorder.emit_reduce(seq, [info], impl="all_reduce", op=op_name(op), group=ranks)
    if not async_op:
        recorder.sample_grads(seq, AFTER, [info])

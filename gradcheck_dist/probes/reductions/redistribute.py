"""Gradients that autograd itself reduces: parameters that are DTensors and are redistributed in forward.

The backward of a redistribution sums what each rank contributed and hands the parameter the whole (or its shard), so
what arrives there is no contribution any more. The contribution is what enters that backward. Semantics:
torch/distributed/tensor/_redistribute.py, Redistribute; `to_local(grad_placements=[Partial()])` declares the summands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from gradcheck_dist.events import AFTER, BY_AUTOGRAD, LEAF
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.graph_leaves import LEAF_NODE
from gradcheck_dist.probes.parameters.registry import Layout, ParamInfo
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded


def install(recorder: Recorder, patches: Patches) -> None:
    def on_import(module: ModuleType) -> None:
        try:
            patches.replace(module.Redistribute, "backward", lambda original: _watch(recorder, original))
            recorder.status("redistribute", True)
        except Exception as error:  # the user's import must not fail on it
            recorder.status("redistribute", False, f"torch {torch.__version__} has no {error}")

    patches.when_imported("torch.distributed.tensor._redistribute", on_import)
    autograd.CLOSE_LISTENERS.append(complete)
    patches.on_restore(lambda: autograd.CLOSE_LISTENERS.remove(complete))


def _watch(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(ctx: Any, grad_output: Any) -> Any:
        result = original(ctx, grad_output)
        if recorder.current is not None and not recorder.suspended:
            reduced(recorder, ctx, grad_output, result[0])
        return result

    return backward


@guarded("redistribute")
def reduced(recorder: Recorder, node: Any, given: Any, result: Any) -> None:
    """Tell the contribution that entered, and the reduction, when this node's input is a parameter."""
    current = recorder.current
    following = node.next_functions[0][0] if node.next_functions else None
    if current is None or following is None or following.name() != LEAF_NODE:
        return
    info = recorder.registry.find(following.variable)
    before, after = given.placements, result.placements
    dims = [dim for dim, (one, other) in enumerate(zip(before, after, strict=True)) if _is_reduced(one, other)]
    if info is None or not dims:
        return
    if len(dims) > 2 or any(before[dim].reduce_op not in ("sum", "avg") for dim in dims):
        recorder.status("redistribute", False, f"{info.name}: a reduction of {before} to {after} is not followed")
        return
    from torch.distributed.tensor import Replicate

    own = tuple(Replicate() if dim in dims else one for dim, one in enumerate(before))
    local = given._local_tensor
    layout = Layout(tuple(given.shape), given.device_mesh, own, tuple(local.shape))
    info.managed_by = "fsdp"  # sampled by its reductions
    current.reduced_inside[info.id] = (info, recorder.next_seq())
    current.touched[info.id] = info
    recorder.sample(current.seq, LEAF, info, local, layout)
    recorder.emit_reduce(current.reduced_inside[info.id][1], [info], **_groups(given.device_mesh, before, after, dims))


def _is_reduced(before: Any, after: Any) -> bool:
    return bool(before.is_partial() and not after.is_partial())


def _groups(mesh: Any, before: Any, after: Any, dims: list[int]) -> dict[str, Any]:
    """A reduce-scatter, an all-reduce, or one behind the other, in the words of fully_shard's reductions."""
    scattered = [dim for dim in dims if after[dim].is_shard()]
    joined = [dim for dim in dims if dim not in scattered]
    shard, replicate = (
        tuple(dist.get_process_group_ranks(mesh.get_group(one[0]))) if one else () for one in (scattered, joined)
    )
    return {
        "impl": "hsdp" if shard and replicate else "fsdp" if shard else "replicate",
        "group": shard or (dist.get_rank(),),
        "op": before[scattered[0]].reduce_op if scattered else "sum",
        "replicate_group": replicate,
        "replicate_op": before[joined[0]].reduce_op if joined else None,
        "hook": BY_AUTOGRAD,
    }


@guarded("redistribute")
def complete(recorder: Recorder, current: BackwardPass) -> None:
    """The results lie in `.grad` when the pass is over."""
    by_info: dict[int, tuple[ParamInfo, int]] = current.reduced_inside
    for info, seq in by_info.values():
        recorder.sample_grads(seq, AFTER, [info])

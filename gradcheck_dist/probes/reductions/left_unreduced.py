"""What FSDP2 holds of an earlier step when the next one begins.

It reduces in those passes that set_requires_gradient_sync and set_requires_all_reduce tell it to, and keeps the rest as
its modules compute with it, or summed over the shards of one replica. `zero_grad` empties shards alone.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `post_backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gradcheck_dist.events import BEFORE, LeftUnreduced
from gradcheck_dist.probes.parameters.registry import Layout, ParamInfo
from gradcheck_dist.probes.recording.recorder import Recorder, guarded

Left = tuple[ParamInfo, Tensor, Layout | None]


def install(recorder: Recorder) -> None:
    recorder.before_first_pass.append(functools.partial(tell_left, recorder))


@guarded("fsdp")
def tell_left(recorder: Recorder) -> None:
    """Tell it of parameters that an optimizer has stepped since."""
    stepped = recorder.read.in_step(recorder.step - 1)
    groups = list(recorder.fsdp_groups) if stepped else []
    for over_shards, find in ((False, _unsharded), (True, _over_shards)):
        found = [left for group in groups for left in find(recorder, group) if left[0].id in stepped]
        if found:
            _tell(recorder, sorted(found, key=lambda left: left[0].id), over_shards)


def _tell(recorder: Recorder, found: list[Left], over_shards: bool) -> None:
    seq = recorder.next_seq()
    for info, grad, layout in found:
        recorder.sample(seq, BEFORE, info, grad, layout)
    params = recorder.registry.param_set([info for info, _, _ in found])
    recorder.emit(LeftUnreduced, seq=seq, params=params, over_shards=over_shards)


def _unsharded(recorder: Recorder, group: Any) -> Iterator[Left]:
    """Gradients that lie whole on this rank. To sum what others hold summands of would be a collective."""
    for fsdp_param in group.fsdp_params:
        info = recorder.registry.find(fsdp_param.sharded_param)
        grad = fsdp_param.unsharded_accumulated_grad
        if grad is None:
            grad = getattr(getattr(fsdp_param, "_unsharded_param", None), "grad", None)
        partial = any(placement.is_partial() for placement in getattr(grad, "placements", ()))
        if info is not None and grad is not None and not partial and not is_plain(fsdp_param):
            yield info, grad, None


def _over_shards(recorder: Recorder, group: Any) -> Iterator[Left]:
    """This rank's shards of what was summed over its replica, one behind the other."""
    summed = group._partial_reduce_output
    sizes = [fsdp_param.padded_sharded_param_size.numel() for fsdp_param in group.fsdp_params]
    if summed is None or summed.numel() != sum(sizes):
        return  # some parameters had no gradient
    for fsdp_param, part in zip(group.fsdp_params, summed.split(sizes), strict=True):
        info, size = recorder.registry.find(fsdp_param.sharded_param), fsdp_param.sharded_size
        if info is not None and not is_plain(fsdp_param):
            yield info, part[: size.numel()].view(size), Layout.of(fsdp_param.sharded_param)


def is_plain(fsdp_param: Any) -> bool:
    """Whether modules compute with one rank's part of a tensor that others share, and autograd does not know of it
    (torch 2.15, fully_shard of parameters with spmd_types annotations)."""
    return getattr(fsdp_param, "is_spmd_types", False)

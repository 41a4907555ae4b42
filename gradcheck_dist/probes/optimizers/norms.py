"""Norms of the gradients really seen: one pass over memory where they are clipped or, unclipped, stepped."""

from __future__ import annotations

import functools
from array import array
from collections import defaultdict
from collections.abc import Iterable
from math import nan

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.events import Norms
from gradcheck_dist.probes.parameters.registry import ParamInfo, originals
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.samples import Seen
from gradcheck_dist.stats.inputs import DTYPES
from gradcheck_dist.stats.norms import PendingNorms, on_host, start


@guarded("norms")
def record_norms(recorder: Recorder, seq: int, infos: list[ParamInfo], seen: Seen | None = None) -> None:
    """Record the norm of what this rank holds of each `.grad`, as it is now. Nobody waits for an accelerator.

    Of sparse gradients and layouts that torch's statistics do not read the norm is NaN. Of an optimizer's own copies
    it is the norm of each parameter's part. `seen`: where gradients lie now, used where they are just this list's.
    """
    if not recorder.sampling or not infos:
        return
    if seen is not None and seen.infos is infos:
        _write_plain(recorder, seq, seen.bundle.norm_rows, *on_host(seen.grads, seen.bundle.sizes, seen.found))
        return
    if _record_plain(recorder, seq, infos):
        return
    grads: dict[torch.device, list[tuple[int, int, Tensor]]] = defaultdict(list)
    unread: list[ParamInfo] = []
    for info in infos:
        grad = info.param.grad
        if grad is None:
            continue
        local: Tensor = getattr(grad, "_local_tensor", grad)
        if local.layout is not torch.strided or local.dtype not in DTYPES:
            unread += originals(info)
        elif info.regions:
            for region in info.regions:
                if region.length:
                    flat = local.reshape(-1)[region.offset : region.offset + region.length]
                    plan = recorder.registry.region_plan(region, local.device)
                    grads[local.device].append((region.info.id, plan.id, flat))
        else:
            found = recorder.registry.plan(info, grad)
            grads[local.device].append((info.id, found[0].id if found is not None else -1, grad))
    if unread:  # there is a gradient, and its norm is not known
        strange = array("i", [number for info in unread for number in (info.id, -1, 0)])
        values = array("d", [nan] * len(unread))
        recorder.num_norms += 1
        recorder.writer.append(Norms(step=recorder.step, seq=seq, rows=strange.tobytes(), values=values.tobytes()))
    for of_device in grads.values():
        rows = array("i", [number for param, plan, _ in of_device for number in (param, plan)])
        pending = start([grad for _, _, grad in of_device])
        recorder.num_norms += 1
        recorder.copies.expect(pending, functools.partial(_write, recorder, recorder.step, seq, rows, pending))


def taken(grad: Tensor) -> PendingNorms | None:
    """The norm of a gradient that is not in its place, or not for long; None of what torch's statistics do not read."""
    local: Tensor = getattr(grad, "_local_tensor", grad)
    return start([grad]) if local.layout is torch.strided and local.dtype in DTYPES else None


@guarded("norms")
def record_taken(recorder: Recorder, seq: int, norms: Iterable[tuple[int, int, PendingNorms]]) -> None:
    """Record norms that were taken before: (parameter, plan, norm)."""
    for param, plan, pending in norms:
        rows = array("i", [param, plan])
        recorder.num_norms += 1
        recorder.copies.expect(pending, functools.partial(_write, recorder, recorder.step, seq, rows, pending))


def _record_plain(recorder: Recorder, seq: int, infos: list[ParamInfo]) -> bool:
    """The same where all gradients are plain float32 ones on the CPU; False, and nothing is done, for others."""
    bundle = recorder.bundle(infos)
    if bundle is None or bundle.dtype is not torch.float32:
        return False
    grads = [param.grad for param in bundle.params]
    present: list[Tensor] = []
    for grad in grads:
        if type(grad) is Tensor and grad.is_cpu and grad.dtype is torch.float32 and grad.layout is torch.strided:
            present.append(grad)
        elif grad is not None:
            return False
    table = bundle.norm_rows
    if len(present) < len(grads):
        table = table[[grad is not None for grad in grads]]
    _write_plain(recorder, seq, table, *on_host(present, [grad.numel() for grad in present]))
    return True


def _write_plain(recorder: Recorder, seq: int, table: np.ndarray, norms: np.ndarray, counts: np.ndarray) -> None:
    table[:, 2] = np.minimum(counts, 2**31 - 1)
    recorder.num_norms += 1
    recorder.writer.append(Norms(step=recorder.step, seq=seq, rows=table.tobytes(), values=norms.tobytes()))


def _write(recorder: Recorder, step: int, seq: int, rows: array[int], pending: PendingNorms) -> None:
    norms, counts = pending.result()
    table = array("i")
    for index, num_nonfinite in enumerate(counts):
        table.extend((rows[2 * index], rows[2 * index + 1], min(int(num_nonfinite), 2**31 - 1)))
    recorder.writer.append(Norms(step=step, seq=seq, rows=table.tobytes(), values=norms.astype("<f8").tobytes()))

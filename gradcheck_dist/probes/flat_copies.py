"""Copies of gradients, one after the other in a buffer that was made for one collective: known by their values.

Hand-written trainers flatten gradients (`torch.cat`, torch._utils._flatten_dense_tensors), divide them, reduce the
buffer and copy it back. Nothing tells at which addresses such a buffer will lie. It holds gradients of neighbours (in
the order of the model's parameters, or the other way round), whole and times one number. Buffers of another type than
the gradients are left alone: rounding hides what they hold.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradcheck_dist.probes.regions import Region
from gradcheck_dist.probes.registry import ParamInfo

NUM_COMPARED = 8
"""Elements of each gradient."""
LEAST = 6
"""Elements that are not zero, in all: fewer are a multiple of others by chance."""
MAX_TRIED = 64
"""Runs of parameters that are compared with one buffer."""
MAX_PADDING = 4096
"""Zeros behind the last gradient, or an eighth of all gradients: ranks are given parts of one size."""


def regions_by_value(tensor: Tensor, infos: Sequence[ParamInfo]) -> list[Region]:
    """Which gradients a tensor is a copy of, times one number; [] where it is none, or lies on an accelerator, whose
    values nobody waits for."""
    if tensor.layout is not torch.strided or not (tensor.is_cpu and tensor.is_contiguous()):
        return []
    held = [info for info in infos if _readable(info.param.grad, tensor.dtype)]
    flat = tensor.detach().reshape(-1)
    sizes = tuple(info.param.numel() for info in held)
    runs = _runs(sizes, flat.numel())[:MAX_TRIED]
    padding = flat.numel() - sum(sizes)
    if held and not runs and 0 < padding <= max(MAX_PADDING, sum(sizes) // 8) and not flat[-padding:].any():
        runs = [(order, 0, len(held)) for order in (1, -1)]  # all of them, filled up to what ranks can divide
    for order, first, last in runs:
        run = held[::order][first:last]
        if _is_copy(flat, run):
            found, offset = [], 0
            for info in run:
                found.append(Region(info, 0, offset, info.param.numel()))
                offset += info.param.numel()
            return found
    return []


def _readable(grad: Tensor | None, dtype: torch.dtype) -> bool:
    return type(grad) is Tensor and grad.is_cpu and grad.layout is torch.strided and grad.dtype is dtype


@functools.lru_cache(maxsize=4096)
def _runs(sizes: tuple[int, ...], num_elements: int) -> list[tuple[int, int, int]]:
    """Neighbours that have so many elements together, the longest runs first: (1 or -1 for the other way round, first,
    last + 1). Asked for with the same numbers in every step."""
    found = []
    for order in (1, -1) if len(sizes) > 1 else (1,):
        first, total = 0, 0
        ordered = sizes[::order]
        for last, size in enumerate(ordered):
            total += size
            while total > num_elements:
                total -= ordered[first]
                first += 1
            if total == num_elements and first <= last:
                found.append((order, first, last + 1))
    return sorted(found, key=lambda run: run[1] - run[2])


def _compared(info: ParamInfo, grad: Tensor) -> Tensor:
    """Which elements of a gradient are compared. Most rows of an embedding's are zero: those that are not tell."""
    chosen = torch.as_tensor(info.positions[:: max(1, len(info.positions) // NUM_COMPARED)][:NUM_COMPARED])
    if int((grad.take(chosen) != 0).sum()) >= min(LEAST, len(chosen)):
        return chosen
    told = grad.reshape(-1).nonzero().reshape(-1)
    return told[:: max(1, len(told) // NUM_COMPARED)][:NUM_COMPARED] if len(told) else chosen


def _is_copy(flat: Tensor, run: list[ParamInfo]) -> bool:
    offset, mine, theirs = 0, [], []
    for info in run:
        assert info.param.grad is not None
        which = _compared(info, info.param.grad.detach())
        mine.append(info.param.grad.detach().take(which).double())
        theirs.append(flat.take(which + offset).double())
        offset += info.param.numel()
    grads, values = torch.cat(mine), torch.cat(theirs)
    size = float(grads @ grads)
    if not size or int((values != 0).sum()) < min(LEAST, flat.numel()):
        return False
    factor = float(values @ grads) / size
    allowed = 4 * torch.finfo(flat.dtype).eps
    # Element by element: a gradient much smaller than its neighbours is compared at its own size.
    return bool(((values - factor * grads).abs() <= allowed * (factor * grads).abs()).all()) and factor != 0

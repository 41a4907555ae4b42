"""Gradients in the buffer of a reduce-scatter: of each the first rank's part, then of each the second's.

Parts are filled up to be equal. Source: reduce_scatter_coalesced in deepspeed/runtime/comm/coalesced_collectives.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradcheck_dist.probes.parameters.elements import LEAST, agree, compared, gradient_beside, neighbours, rounding
from gradcheck_dist.probes.parameters.regions import Region, part_size
from gradcheck_dist.probes.parameters.registry import ParamInfo


def runs_in_parts(buffer: Tensor, infos: Sequence[ParamInfo], num_ranks: int) -> Iterator[list[ParamInfo]]:
    """Neighbours whose parts for so many ranks would fill a buffer."""
    if num_ranks < 2 or buffer.dim() != 1 or buffer.numel() % num_ranks:
        return
    sizes = tuple([part_size(info, num_ranks) for info in infos])
    for order, first, last in neighbours(sizes, buffer.numel() // num_ranks):
        yield list(infos[::order][first:last])


def parts_of(run: Sequence[ParamInfo], num_ranks: int) -> list[Region]:
    """Where the parts of some gradients lie."""
    found, offset = [], 0
    for rank in range(num_ranks):
        for info in run:
            start = rank * part_size(info, num_ranks)
            length = min(part_size(info, num_ranks), info.numel - start)
            if length > 0:
                found.append(Region(info, start, offset, length))
            offset += part_size(info, num_ranks)
    return found


def are_in_parts(buffer: Tensor, run: Sequence[ParamInfo], regions: Sequence[Region]) -> bool:
    """Whether a buffer holds the gradients of a run, times one number, where regions say."""
    mine, theirs = [], []
    for info in run:
        grad = gradient_beside(info)
        assert grad is not None
        which = compared(info, grad.detach())
        places = which.clone()
        for region in (region for region in regions if region.info is info):
            inside = (which >= region.start) & (which < region.start + region.length)
            places[inside] = which[inside] - region.start + region.offset
        mine.append(grad.detach().take(which))
        theirs.append(buffer.take(places))
    grads, values = torch.cat(mine).cpu().double(), torch.cat(theirs).cpu().double()
    allowed, lost, _ = rounding(buffer, run)
    enough = int((values.abs() * allowed > lost).sum()) >= LEAST
    return enough and agree(grads, values, allowed, lost)

"""Whether a buffer holds gradients times one number, told by a few elements of each."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradcheck_dist.probes.parameters.regions import buffer_of
from gradcheck_dist.probes.parameters.registry import ParamInfo

Run = tuple[int, int, int]
"""Neighbours: 1 or -1 for the other way round, first, last + 1"""

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NUM_COMPARED = 8
"""Elements of each gradient."""
LEAST = 6
"""Elements that are not zero, in all: fewer are a multiple of others by chance."""


def gradient_beside(info: ParamInfo) -> Tensor | None:
    """A gradient of the parameter's size; of a DTensor's there is only a part here."""
    grad = info.param.grad
    return buffer_of(info) if grad is None else grad


def _readable(grad: Tensor | None, beside: Tensor) -> bool:
    """Whether a gradient can be compared with a buffer."""
    if type(grad) is not Tensor or grad.device != beside.device:
        return False
    return grad.layout is torch.strided and grad.dtype in TYPES


def could_hold(flat: Tensor, infos: Sequence[ParamInfo]) -> bool:
    """Whether a buffer could hold the gradients of these parameters."""
    return all(_readable(gradient_beside(info), flat) for info in infos)


def of_types(infos: list[ParamInfo], buffer: Tensor) -> Iterator[list[ParamInfo]]:
    """Whose gradients a buffer may hold: those of its type, or all."""
    if buffer.dtype in TYPES:
        every = [info for info in infos if _readable(gradient_beside(info), buffer)]
        same = [info for info in every if _type(info) is buffer.dtype]
        yield from ([same, every] if same and len(same) < len(every) else [every])


def _type(info: ParamInfo) -> torch.dtype | None:
    grad = gradient_beside(info)
    return None if grad is None else grad.dtype


def rounding(flat: Tensor, mine: Sequence[ParamInfo]) -> tuple[float, float, bool]:
    """How far apart elements of a copy and of gradients may be, relative and absolute (below float16's least normal
    number each has fewer digits), and whether all are of one type."""
    types = {flat.dtype, *map(_type, mine)}
    if len(types) == 1:
        return 4 * torch.finfo(flat.dtype).eps, 0.0, True
    told = torch.finfo(flat.dtype)
    return max(2 * torch.finfo(one).eps for one in types if one), told.tiny * told.eps, False


@functools.lru_cache(maxsize=4096)
def neighbours(sizes: tuple[int, ...], num_elements: int) -> list[Run]:
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
    return sorted(found, key=lambda run: (run[1] - run[2], run[1]))


def compared(info: ParamInfo, grad: Tensor) -> Tensor:
    """Which elements of a gradient are compared. Most rows of an embedding's are zero: those that are not tell."""
    positions = info.positions[:: max(1, len(info.positions) // NUM_COMPARED)][:NUM_COMPARED]
    chosen = torch.as_tensor(positions, device=grad.device)
    if int((grad.take(chosen) != 0).sum()) >= min(LEAST, len(chosen)):
        return chosen
    told = grad.reshape(-1).nonzero().reshape(-1)
    return told[:: max(1, len(told) // NUM_COMPARED)][:NUM_COMPARED] if len(told) else chosen


def elements(flat: Tensor, run: Sequence[ParamInfo]) -> tuple[Tensor, Tensor]:
    """Compared elements of gradients, and what stands in their place, as float64."""
    offset, mine, theirs = 0, [], []
    for info in run:
        grad = gradient_beside(info)
        assert grad is not None
        grad = grad.detach()
        which = compared(info, grad)
        mine.append(grad.take(which))
        theirs.append(flat.take(which + offset))
        offset += info.numel
    return torch.cat(mine).cpu().double(), torch.cat(theirs).cpu().double()


def agree(grads: Tensor, values: Tensor, allowed: float, lost: float = 0.0) -> bool:
    """Whether values are gradients times one number that is not zero, within `allowed` of each and `lost`."""
    factor = multiple(grads, values)
    return are_multiples(values, grads, factor, allowed, lost) and (factor != 0 or not bool(grads.any()))


def multiple(grads: Tensor, values: Tensor) -> float:
    """The number that is nearest to being their ratio; 0 for zeros."""
    size = float(grads @ grads)
    return float(values @ grads) / size if size else 0.0


def are_multiples(values: Tensor, grads: Tensor, factor: float, allowed: float, lost: float) -> bool:
    # Element by element: a gradient much smaller than its neighbours is compared at its own size.
    return bool(((values - factor * grads).abs() <= allowed * (factor * grads).abs() + lost).all())

"""Copies of gradients, one after the other in a buffer that was made for one collective: known by their values.

Hand-written trainers flatten gradients (`torch.cat`, torch._utils._flatten_dense_tensors), divide them, reduce the
buffer and copy it back. Nothing tells at which addresses such a buffer will lie. It holds gradients, whole and times
one number: in the order of the model's parameters, or the other way round, those of neighbours, or of some that a
trainer picked out (what sequence parallelism has to sum), or in an order of its own (by size or name).

A buffer of another type than the gradients (bfloat16, to send less) holds them as nearly as the coarser type tells. By
chance an element is within a spacing of bfloat16 on either side of a multiple of a gradient's in less than one of 50
cases. One of LEAST elements fixes the multiple, and all others are so near in one of 3e8.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcheck_dist.probes.parameters.device_copies import DeviceCopies
from gradcheck_dist.probes.parameters.regions import Region, buffer_of
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.parameters.stand_ins import is_host

Run = tuple[int, int, int]
"""Neighbours: 1 or -1 for the other way round, first, last + 1"""

Orders = dict[int, list[ParamInfo]]
"""Parameters in the model's order (1) and against it (-1)."""

Result = tuple[list[Region], Tensor, Tensor]
"""What a copy held, and values of what its reduction gave: where they lie in the copy, and what they are."""

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NUM_COMPARED = 8
"""Elements of each gradient."""
NUM_OF_RESULT = 32
"""Elements of what a reduction gave."""
LEAST = 6
"""Elements that are not zero, in all: fewer are a multiple of others by chance."""
MAX_TRIED = 64
"""Runs of parameters that are compared with one buffer."""
MAX_COMPARED = 1024
"""Gradients of a step that are compared with what turns out to be no copy, some 50 us each."""
LOOKED_AT_LIKE_ONE_COMPARED = 4
"""Gradients of which two elements are looked up for a search in any order that count as one compared. They take longer
(41 us beside 28 for 64 x 64), but a model of a thousand is to be searched as well."""
ASKED_LIKE_ONE_COMPARED = 128
"""Parameters that are asked whether they have a gradient in the time of one comparison."""
MOST_RESULTS = 8
"""Results of reductions that are remembered, of one size."""
MAX_PADDING = 4096
"""Zeros behind the last gradient, or an eighth of all gradients: ranks are given parts of one size."""
MAX_PARTS = 64
"""Ranks, fewer than which are the zeros behind the last one of some gradients alone."""


class FlatCopies:
    """Looks for the gradients that a tensor is a copy of. Remembers which parameters have a gradient, and behind which
    it found the last copy: those that are flattened one after the other are found without a search."""

    def __init__(self, infos: Callable[[], list[ParamInfo]]) -> None:
        self._infos = infos
        self._held: dict[torch.dtype, Orders] = {}  # those among which the last copy of this type was found
        self._next: dict[torch.dtype, tuple[int, int]] = {}  # direction, and behind how many parameters in it
        self._picked: dict[int, list[ParamInfo]] = {}  # what was in buffers of this size of such that are no neighbours
        self._left = MAX_COMPARED
        self._results: dict[int, deque[Result]] = {}  # by the size of the copy that was reduced
        self._elsewhere = DeviceCopies(self._search_elsewhere, _hold)

    def step_begins(self) -> None:
        self._elsewhere.step_begins()
        self._left = MAX_COMPARED
        self._held.clear()
        self._results.clear()

    def came_out(self, copied: Sequence[Region], size: int, output: Tensor, own: Sequence[Region]) -> None:
        """Remember some values of what a reduction of a copy gave, to know it again when it is reduced once more.

        Args:
            copied: what the copy of `size` elements held.
            own: what of it lies in `output`: all of it, or this rank's shard.
        """
        if own and not is_host(output) and output.numel() == size:
            self._elsewhere.came_out(copied, output)
        if not own or not is_host(output):
            return
        whole = next(region for region in copied if region.info is own[0].info)
        low = whole.offset + own[0].start - whole.start - own[0].offset
        flat = output.detach().reshape(-1)
        told = flat.nonzero().reshape(-1)
        chosen = told[:: max(1, len(told) // NUM_OF_RESULT)][:NUM_OF_RESULT]
        if len(chosen) >= LEAST:
            kept = self._results.setdefault(size, deque(maxlen=MOST_RESULTS))
            kept.append((list(copied), chosen + low, flat.take(chosen).double()))

    def reduced(self, tensor: Tensor) -> list[ParamInfo]:
        """Whose gradients a tensor holds that is the result of a reduction of this step, times one number."""
        if type(tensor) is not Tensor or not (tensor.is_contiguous() and tensor.is_floating_point()):
            return []
        if not is_host(tensor):
            return [region.info for region in self._elsewhere.reduced(tensor)]
        if tensor.numel() not in self._results:
            return []
        return [region.info for region in self._once_more(tensor.detach().reshape(-1))]

    def _once_more(self, flat: Tensor) -> list[Region]:
        """What a tensor holds that is the result of a reduction of this step, times one number."""
        for regions, places, values in self._results.get(flat.numel(), ()):
            if _agree(values, flat.take(places).double(), 4 * torch.finfo(flat.dtype).eps):
                return regions
        return []

    def regions(self, tensor: Tensor, *, stacked: bool = False) -> list[Region]:
        """Which gradients a tensor is a copy of, times one number; [] where it is none. `stacked`: also where it has
        more than one dimension, and zeros behind the last gradient, as in an optimizer's own step."""
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            return []
        if not is_host(tensor):
            return self._elsewhere.regions(tensor, stacked=stacked)
        return self._search(tensor, stacked)

    def _search_elsewhere(self, tensor: Tensor, stacked: bool) -> tuple[list[Region], bool]:
        found = self._search(tensor, stacked)
        return found, any(held[1] for held in self._held.values())

    def _search(self, tensor: Tensor, stacked: bool) -> list[Region]:
        flat = tensor.detach().reshape(-1)
        if self._results and flat.is_floating_point() and (again := self._once_more(flat)):
            return again
        held = self._held.get(tensor.dtype)
        left = self._left
        if (
            (known := self._picked.get(flat.numel()))
            and self._is_copy(flat, known)
            and not _behind_all(flat, known).any()
        ):
            return _regions(known)
        if held is not None and tensor.dtype in self._next:
            order, first = self._next[tensor.dtype]
            run = order, first, _behind(held[order], first, flat.numel())
            if run[2] and self._is_copy(flat, held[order][first : run[2]], expected=True):
                return self._found(held, run, left, tensor.dtype)
        if left <= 0:
            return []
        infos = self._infos()
        self._left -= len(infos) // ASKED_LIKE_ONE_COMPARED
        for own in _alike(infos, tensor):
            held = self._held[tensor.dtype] = {1: own, -1: own[::-1]}
            for run in _candidates(own, flat):
                if self._left <= 0:
                    break
                if self._is_copy(flat, held[run[0]][run[1] : run[2]]):
                    return self._found(held, run, left, tensor.dtype)
            if not (tensor.dim() == 1 or stacked):
                continue  # an activation: there are many, and each would be compared with all gradients
            if picked := self._pick(flat, held, _filled(flat) if stacked else None):
                self._left, self._picked[flat.numel()] = left, picked
                return _regions(picked)
        return []

    def _found(self, held: Orders, run: Run, left: int, dtype: torch.dtype) -> list[Region]:
        order, first, last = run
        self._next[dtype], self._left = (order, last), left
        return _regions(held[order][first:last])

    def _is_copy(self, flat: Tensor, mine: Sequence[ParamInfo], expected: bool = False) -> bool:
        """`expected`: behind the last copy of this type, so that few elements are no chance."""
        if sum(info.param.numel() for info in mine) > flat.numel():
            return False
        if not _hold(flat, mine):
            return False
        allowed, lost, same = _rounding(flat, mine)
        self._left -= 1
        if len(mine) > 1 and not _agree(*_values(flat, mine[:1]), 2 * allowed, lost):
            return False
        self._left -= len(mine) - 1
        grads, values = _values(flat, mine)
        least = min(LEAST, flat.numel()) if same or expected else LEAST
        enough = int((values.abs() * allowed > lost).sum()) >= least
        return enough and bool(grads.any()) and _agree(grads, values, allowed, lost)

    def _pick(self, flat: Tensor, held: Orders, until: int | None) -> list[ParamInfo]:
        """The gradients that fill a buffer from end to end, or `until` there, whatever lies between them in the model;
        [] for none."""
        end = flat.numel() if until is None else until
        for own in held.values():
            total = sum(info.param.numel() for info in own)
            for first, info in enumerate(own):
                if total < end or self._left <= 0:
                    break
                if (picked := self._walk(flat, own[first:], end)) and self._is_copy(flat, picked):
                    return picked
                total -= info.param.numel()
        picked = self._walk_in_any_order(flat, held[1], end)
        return picked if picked and self._is_copy(flat, picked) else []

    def _walk_in_any_order(self, flat: Tensor, own: Sequence[ParamInfo], end: int) -> list[ParamInfo]:
        """The gradients that fill a buffer, whichever comes next. Two elements of each tell which it may be."""
        total = sum(info.param.numel() for info in own)
        if self._left <= 0 or total + _padding(total) < end:
            return []
        fitting = [info for info in own if info.param.numel() <= flat.numel()]  # few, beside numbers for a log
        self._left -= len(fitting) // LOOKED_AT_LIKE_ONE_COMPARED
        # One element is a multiple of anything: the largest ones have the first word.
        marks = [mark for info in fitting if (mark := _mark(info)) is not None]
        marks.sort(key=lambda mark: -mark.info.param.numel())
        if not marks:
            return []
        places, numbers = (
            torch.tensor([mark.places for mark in marks], device="cpu"),
            torch.stack([mark.values for mark in marks]),
        )
        sizes = torch.tensor([mark.info.param.numel() for mark in marks], device="cpu")
        allowed, lost, _ = _rounding(flat, own)
        left = torch.ones(len(marks), dtype=torch.bool, device="cpu")
        picked: list[ParamInfo] = []
        offset, factor = 0, 0.0
        while offset < end:
            (open_,) = (left & (sizes <= flat.numel() - offset)).nonzero(as_tuple=True)
            values = flat.take((places[open_] + offset).to(flat.device)).double().cpu()
            ratios = factor if factor else values[:, :1] / numbers[open_, :1]
            meant = ratios * numbers[open_]
            near = ((values - meant).abs() <= 4 * allowed * meant.abs() + 2 * lost).all(1) & (meant[:, 0] != 0)
            for index in open_[near].tolist():
                if self._left <= 0:
                    return []
                self._left -= 1
                grads, values = _values(flat[offset:], [marks[index].info])
                told = factor or _multiple(grads, values)
                if told and _are(values, grads, told, 2 * allowed, lost):
                    picked.append(marks[index].info)
                    left[index], factor = False, told
                    offset += picked[-1].param.numel()
                    break
            else:
                return picked if flat.numel() - offset <= _padding(offset) and not flat[offset:].any() else []
        return picked

    def _walk(self, flat: Tensor, own: Sequence[ParamInfo], end: int) -> list[ParamInfo]:
        """The first gradient and each later one that is what comes next in the buffer, times the same number."""
        picked: list[ParamInfo] = []
        allowed, lost, _ = _rounding(flat, own)
        offset, factor = 0, 0.0
        for info in own:
            size = info.param.numel()
            if self._left <= 0 or (offset + size > flat.numel() and not picked):
                break
            if offset + size <= flat.numel():
                self._left -= 1
                grads, values = _values(flat[offset:], [info])
                told = factor or _multiple(grads, values)
                if _are(values, grads, told, 2 * allowed, lost) and (told or not grads.any()):
                    picked.append(info)
                    offset, factor = offset + size, told
                elif not picked:
                    break
            if picked and offset >= end:
                return picked
        return []


def _filled(flat: Tensor) -> int:
    """Up to where a buffer holds anything."""
    told = flat.nonzero()
    return int(told[-1]) + 1 if len(told) else flat.numel()


def _behind(infos: Sequence[ParamInfo], first: int, num_elements: int) -> int:
    """Where neighbours from `first` on that have so many elements together end; 0 where none do."""
    total, index = 0, first
    while index < len(infos) and total < num_elements:
        total += infos[index].param.numel()
        index += 1
    return index if total == num_elements and index > first else 0


def _candidates(held: list[ParamInfo], flat: Tensor) -> list[Run]:
    sizes = tuple([info.param.numel() for info in held])
    runs = _runs(sizes, flat.numel())[:MAX_TRIED]
    padding = flat.numel() - sum(sizes)
    if held and not runs and 0 < padding <= _padding(sum(sizes)) and not flat[-padding:].any():
        runs = [(order, 0, len(held)) for order in (1, -1)]  # all of them, filled up to what ranks can divide
    if held and not runs and flat.numel() and not flat[-1]:
        tail = flat[-MAX_PARTS:]
        zeros = len(tail) - _filled(tail) if tail.any() else len(tail) - 1
        runs = [run for few in range(1, zeros + 1) for run in _runs(sizes, flat.numel() - few)][:MAX_TRIED]
    return runs


def _behind_all(flat: Tensor, mine: Sequence[ParamInfo]) -> Tensor:
    return flat[sum(info.param.numel() for info in mine) :]


def _padding(num_elements: int) -> int:
    return max(MAX_PADDING, num_elements // 8)


class _Mark(NamedTuple):
    """Two elements of a gradient, the largest of those that are compared."""

    info: ParamInfo
    places: tuple[int, int]
    values: Tensor


def _mark(info: ParamInfo) -> _Mark | None:
    """None for a gradient that is zero there."""
    grad = _grad(info)
    assert grad is not None
    which = _compared(info, grad.detach())
    values = grad.detach().take(which).cpu().double()
    if not values.any():
        return None
    most = values.abs().topk(min(2, len(values))).indices
    first, last = int(most[0]), int(most[-1])
    return _Mark(info, (int(which[first]), int(which[last])), values[[first, last]])


def _grad(info: ParamInfo) -> Tensor | None:
    """A gradient of the parameter's size; of a DTensor's there is only a part here."""
    grad = info.param.grad
    return buffer_of(info) if grad is None else grad


def _readable(grad: Tensor | None, beside: Tensor) -> bool:
    """Whether a gradient can be compared with a buffer."""
    if type(grad) is not Tensor or grad.device != beside.device:
        return False
    return grad.layout is torch.strided and grad.dtype in TYPES


def _hold(flat: Tensor, infos: Sequence[ParamInfo]) -> bool:
    """Whether a buffer could hold the gradients of these parameters."""
    return all(_readable(_grad(info), flat) for info in infos)


def _alike(infos: list[ParamInfo], buffer: Tensor) -> Iterator[list[ParamInfo]]:
    """Whose gradients a buffer may hold: those of its type, or all."""
    if buffer.dtype in TYPES:
        every = [info for info in infos if _readable(_grad(info), buffer)]
        same = [info for info in every if _type(info) is buffer.dtype]
        yield from ([same, every] if same and len(same) < len(every) else [every])


def _type(info: ParamInfo) -> torch.dtype | None:
    grad = _grad(info)
    return None if grad is None else grad.dtype


def _rounding(flat: Tensor, mine: Sequence[ParamInfo]) -> tuple[float, float, bool]:
    """How far apart elements of a copy and of gradients may be, relative and absolute (below float16's least normal
    number each has fewer digits), and whether all are of one type."""
    types = {flat.dtype, *map(_type, mine)}
    if len(types) == 1:
        return 4 * torch.finfo(flat.dtype).eps, 0.0, True
    told = torch.finfo(flat.dtype)
    return max(2 * torch.finfo(one).eps for one in types if one), told.tiny * told.eps, False


@functools.lru_cache(maxsize=4096)
def _runs(sizes: tuple[int, ...], num_elements: int) -> list[Run]:
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


def _compared(info: ParamInfo, grad: Tensor) -> Tensor:
    """Which elements of a gradient are compared. Most rows of an embedding's are zero: those that are not tell."""
    positions = info.positions[:: max(1, len(info.positions) // NUM_COMPARED)][:NUM_COMPARED]
    chosen = torch.as_tensor(positions, device=grad.device)
    if int((grad.take(chosen) != 0).sum()) >= min(LEAST, len(chosen)):
        return chosen
    told = grad.reshape(-1).nonzero().reshape(-1)
    return told[:: max(1, len(told) // NUM_COMPARED)][:NUM_COMPARED] if len(told) else chosen


def _values(flat: Tensor, run: Sequence[ParamInfo]) -> tuple[Tensor, Tensor]:
    """Compared elements of gradients, and what stands in their place, as float64."""
    offset, mine, theirs = 0, [], []
    for info in run:
        grad = _grad(info)
        assert grad is not None
        grad = grad.detach()
        which = _compared(info, grad)
        mine.append(grad.take(which))
        theirs.append(flat.take(which + offset))
        offset += info.param.numel()
    return torch.cat(mine).cpu().double(), torch.cat(theirs).cpu().double()


def _agree(grads: Tensor, values: Tensor, allowed: float, lost: float = 0.0) -> bool:
    """Whether values are gradients times one number that is not zero, within `allowed` of each and `lost`."""
    factor = _multiple(grads, values)
    return _are(values, grads, factor, allowed, lost) and (factor != 0 or not bool(grads.any()))


def _multiple(grads: Tensor, values: Tensor) -> float:
    """The number that is nearest to being their ratio; 0 for zeros."""
    size = float(grads @ grads)
    return float(values @ grads) / size if size else 0.0


def _are(values: Tensor, grads: Tensor, factor: float, allowed: float, lost: float) -> bool:
    # Element by element: a gradient much smaller than its neighbours is compared at its own size.
    return bool(((values - factor * grads).abs() <= allowed * (factor * grads).abs() + lost).all())


def _regions(infos: Sequence[ParamInfo]) -> list[Region]:
    found, offset = [], 0
    for info in infos:
        found.append(Region(info, 0, offset, info.param.numel()))
        offset += info.param.numel()
    return found

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

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradcheck_dist.probes.parameters.device_copies import DeviceCopies
from gradcheck_dist.probes.parameters.elements import (
    LEAST,
    Run,
    agree,
    are_multiples,
    compared,
    could_hold,
    elements,
    gradient_beside,
    multiple,
    neighbours,
    of_types,
    rounding,
)
from gradcheck_dist.probes.parameters.regions import Region
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.parameters.scattered import are_in_parts, parts_of, runs_in_parts
from gradcheck_dist.probes.parameters.stand_ins import is_host

Orders = dict[int, list[ParamInfo]]
"""Parameters in the model's order (1) and against it (-1)."""

Result = tuple[list[Region], Tensor, Tensor]
"""What a copy held, and values of what its reduction gave: where they lie in the copy, and what they are."""

NUM_OF_RESULT = 32
"""Elements of what a reduction gave."""
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
        self._in_parts: dict[int, list[ParamInfo]] = {}  # the same, of each of which ranks' parts lie apart
        self._left = MAX_COMPARED
        self._results: dict[int, deque[Result]] = {}  # by the size of the copy that was reduced
        self._elsewhere = DeviceCopies(self._search_elsewhere, could_hold)

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
        whole = next(region for region in copied if region.holds(own[0]))
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
            if agree(values, flat.take(places).double(), 4 * torch.finfo(flat.dtype).eps):
                return regions
        return []

    def regions(self, tensor: Tensor, *, stacked: bool = False, scattered: int = 1) -> list[Region]:
        """Which gradients a tensor is a copy of, times one number; [] where it is none.

        Args:
            stacked: also where it has more than one dimension, and zeros behind the last gradient, as in an optimizer's
                own step.
            scattered: also where it holds an equal part of each gradient for each of so many ranks.
        """
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            return []
        if not is_host(tensor):
            return self._elsewhere.regions(tensor, stacked=stacked, scattered=scattered)
        return self._find(tensor, stacked, scattered)

    def _find(self, tensor: Tensor, stacked: bool, num_ranks: int) -> list[Region]:
        if num_ranks < 2:
            return self._search(tensor, stacked)
        left, size = self._left, tensor.numel()
        if (run := self._in_parts.get(size)) and could_hold(tensor, run):
            regions = parts_of(run, num_ranks)
            if are_in_parts(tensor, run, regions):
                return regions
        return self._search(tensor, stacked) or self._search_parts(tensor, num_ranks, left)

    def _search_parts(self, buffer: Tensor, num_ranks: int, left: int) -> list[Region]:
        for own in of_types(self._infos(), buffer):
            for run in itertools.islice(runs_in_parts(buffer, own, num_ranks), MAX_TRIED):
                self._left -= len(run)
                if self._left <= 0:
                    return []
                if are_in_parts(buffer, run, regions := parts_of(run, num_ranks)):
                    self._left, self._in_parts[buffer.numel()] = left, run
                    return regions
        return []

    def _search_elsewhere(self, tensor: Tensor, stacked: bool, scattered: int) -> tuple[list[Region], bool]:
        found = self._find(tensor, stacked, scattered)
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
        for own in of_types(infos, tensor):
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
        if sum(info.numel for info in mine) > flat.numel():
            return False
        if not could_hold(flat, mine):
            return False
        allowed, lost, same = rounding(flat, mine)
        self._left -= 1
        if len(mine) > 1 and not agree(*elements(flat, mine[:1]), 2 * allowed, lost):
            return False
        self._left -= len(mine) - 1
        grads, values = elements(flat, mine)
        least = min(LEAST, flat.numel()) if same or expected else LEAST
        enough = int((values.abs() * allowed > lost).sum()) >= least
        return enough and bool(grads.any()) and agree(grads, values, allowed, lost)

    def _pick(self, flat: Tensor, held: Orders, until: int | None) -> list[ParamInfo]:
        """The gradients that fill a buffer from end to end, or `until` there, whatever lies between them in the model;
        [] for none."""
        end = flat.numel() if until is None else until
        for own in held.values():
            total = sum(info.numel for info in own)
            for first, info in enumerate(own):
                if total < end or self._left <= 0:
                    break
                if (picked := self._walk(flat, own[first:], end)) and self._is_copy(flat, picked):
                    return picked
                total -= info.numel
        picked = self._walk_in_any_order(flat, held[1], end)
        return picked if picked and self._is_copy(flat, picked) else []

    def _walk_in_any_order(self, flat: Tensor, own: Sequence[ParamInfo], end: int) -> list[ParamInfo]:
        """The gradients that fill a buffer, whichever comes next. Two elements of each tell which it may be."""
        total = sum(info.numel for info in own)
        if self._left <= 0 or total + _padding(total) < end:
            return []
        fitting = [info for info in own if info.numel <= flat.numel()]  # few, beside numbers for a log
        self._left -= len(fitting) // LOOKED_AT_LIKE_ONE_COMPARED
        # One element is a multiple of anything: the largest ones have the first word.
        marks = [mark for info in fitting if (mark := _mark(info)) is not None]
        marks.sort(key=lambda mark: -mark.info.numel)
        if not marks:
            return []
        places, numbers = (
            torch.tensor([mark.places for mark in marks], device="cpu"),
            torch.stack([mark.values for mark in marks]),
        )
        sizes = torch.tensor([mark.info.numel for mark in marks], device="cpu")
        allowed, lost, _ = rounding(flat, own)
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
                grads, values = elements(flat[offset:], [marks[index].info])
                told = factor or multiple(grads, values)
                if told and are_multiples(values, grads, told, 2 * allowed, lost):
                    picked.append(marks[index].info)
                    left[index], factor = False, told
                    offset += picked[-1].numel
                    break
            else:
                return picked if flat.numel() - offset <= _padding(offset) and not flat[offset:].any() else []
        return picked

    def _walk(self, flat: Tensor, own: Sequence[ParamInfo], end: int) -> list[ParamInfo]:
        """The first gradient and each later one that is what comes next in the buffer, times the same number."""
        picked: list[ParamInfo] = []
        allowed, lost, _ = rounding(flat, own)
        offset, factor = 0, 0.0
        for info in own:
            size = info.numel
            if self._left <= 0 or (offset + size > flat.numel() and not picked):
                break
            if offset + size <= flat.numel():
                self._left -= 1
                grads, values = elements(flat[offset:], [info])
                told = factor or multiple(grads, values)
                if are_multiples(values, grads, told, 2 * allowed, lost) and (told or not grads.any()):
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
        total += infos[index].numel
        index += 1
    return index if total == num_elements and index > first else 0


def _candidates(held: list[ParamInfo], flat: Tensor) -> list[Run]:
    sizes = tuple([info.numel for info in held])
    runs = neighbours(sizes, flat.numel())[:MAX_TRIED]
    padding = flat.numel() - sum(sizes)
    if held and not runs and 0 < padding <= _padding(sum(sizes)) and not flat[-padding:].any():
        runs = [(order, 0, len(held)) for order in (1, -1)]  # all of them, filled up to what ranks can divide
    if held and not runs and flat.numel() and not flat[-1]:
        tail = flat[-MAX_PARTS:]
        zeros = len(tail) - _filled(tail) if tail.any() else len(tail) - 1
        runs = [run for few in range(1, zeros + 1) for run in neighbours(sizes, flat.numel() - few)][:MAX_TRIED]
    return runs


def _behind_all(flat: Tensor, mine: Sequence[ParamInfo]) -> Tensor:
    return flat[sum(info.numel for info in mine) :]


def _padding(num_elements: int) -> int:
    return max(MAX_PADDING, num_elements // 8)


class _Mark(NamedTuple):
    """Two elements of a gradient, the largest of those that are compared."""

    info: ParamInfo
    places: tuple[int, int]
    values: Tensor


def _mark(info: ParamInfo) -> _Mark | None:
    """None for a gradient that is zero there."""
    grad = gradient_beside(info)
    assert grad is not None
    which = compared(info, grad.detach())
    values = grad.detach().take(which).cpu().double()
    if not values.any():
        return None
    most = values.abs().topk(min(2, len(values))).indices
    first, last = int(most[0]), int(most[-1])
    return _Mark(info, (int(which[first]), int(which[last])), values[[first, last]])


def _regions(infos: Sequence[ParamInfo]) -> list[Region]:
    found, offset = [], 0
    for info in infos:
        found.append(Region(info, 0, offset, info.numel))
        offset += info.numel
    return found

"""Where gradients lie now, by address: a trainer that asks for one gradient after the other is not to wait for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.probes.parameters.flat_copies import FlatCopies
from gradcheck_dist.probes.parameters.regions import Region, gradient_of, whole
from gradcheck_dist.probes.parameters.registry import ParamInfo, Registry
from gradcheck_dist.stats.inputs import is_dense

Place = tuple[Sequence[Region], Tensor]
"""(what a tensor is made of, the tensor)"""

NEIGHBOURS = 2
"""On either side of what was found last: who replaces gradients one by one asks for them in order."""
MOST_FRUITLESS = 64
"""How often in a step all parameters are asked for what is nobody's gradient (activations, an optimizer's state); from
then on they are asked once in each backward pass and once behind it."""


class Places:
    """Keeps addresses only, never a gradient. What they say is asked of the parameters again, and all are asked where
    it does not account for the whole of a tensor."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._owners: list[tuple[ParamInfo, bool]] = []  # and whether it is an optimizer's copy
        self._addresses: list[int] = []  # of their gradients, 0 where there is none
        self._spans = np.empty((0, 2), dtype=np.int64)
        self._at: dict[int, int] = {}  # the index of whose gradient began at an address
        self._last = 0  # the index of the one that was found last
        self._num_fruitless = 0
        self._asked_since_pass = False
        self.by_value = FlatCopies(registry.infos)
        self.looked_at: Callable[[ParamInfo], None] | None = None  # is told whose gradient was asked where it lies

    def step_begins(self) -> None:
        self._num_fruitless = 0
        self.by_value.step_begins()

    def pass_changes(self) -> None:
        """A backward pass begins or ends: gradients come and go."""
        self._asked_since_pass = False

    def overlapping(self, tensor: Tensor, likely: Iterable[ParamInfo] = ()) -> list[Place]:
        """The gradients, and the gradients of optimizers' copies, that share memory with a dense tensor. `likely`:
        parameters whose gradients may have come since."""
        begin, end = _span(tensor)
        if begin == end:
            return []
        found: list[Place] = []
        for all_asked in self._looks(likely):
            found, covered = self._found(begin, end)
            if all_asked and found:
                self._num_fruitless -= 1
            if covered:
                break
        return found

    def whose(self, tensor: Tensor, often: bool = True) -> ParamInfo | None:
        """Whose gradient a tensor is, or lies where all of one lies (`.grad.data`, a view of it). Not `often`: all
        parameters are asked once in each backward pass and once behind it."""
        address, size = address_of(tensor), getattr(tensor, "_local_tensor", tensor).numel()
        for all_asked in self._looks((), often) if address else ():
            index = self._at.get(address)
            if index is not None and self._measure([index]):
                index = self._at.get(address)
            place = self._place(*self._owners[index]) if index is not None else None
            if index is not None and place is not None and place[1].numel() == size:
                self._last = index
                self._num_fruitless -= all_asked
                return self._owners[index][0]
        return None

    def _looks(self, likely: Iterable[ParamInfo], often: bool = True) -> Iterator[bool]:
        """When to look: at once, when neighbours have moved, and when all were asked (True)."""
        if self._registry.num_known == len(self._owners):
            yield False
            near = {*range(self._last - NEIGHBOURS, self._last + NEIGHBOURS + 1), *(info.id for info in likely)}
            if self._measure([index for index in near if 0 <= index < len(self._owners)]):
                yield False
        if (often and self._num_fruitless < MOST_FRUITLESS) or not self._asked_since_pass:
            self._num_fruitless += 1
            self._asked_since_pass = True
            self._ask()
            yield True

    def _found(self, begin: int, end: int) -> tuple[list[Place], bool]:
        """What is known to overlap and still there, and whether it accounts for all of it."""
        found: list[Place] = []
        parts: set[tuple[int, int]] = set()
        overlap = np.flatnonzero((self._spans[:, 0] < end) & (self._spans[:, 1] > begin)).tolist()
        has_moved = self._measure(overlap)
        for index in overlap:
            first, last = self._spans[index].tolist()
            place = self._place(*self._owners[index])
            if place is None or first >= end or last <= begin:
                continue
            found.append(place)
            parts.add((max(first, begin), min(last, end)))
            self._last = index
        covers = (begin, end) in parts or sum(last - first for first, last in parts) == end - begin
        return found, covers and not has_moved

    def _place(self, info: ParamInfo, is_copy: bool) -> Place | None:
        if is_copy:
            grad: Any = info.param.grad
            grad = getattr(grad, "_local_tensor", grad)
            # Of what is a part in an optimizer's eyes alone, the whole gradient is no copy's.
            arrives = grad is not None and any(
                one.info.param is info.param and one.info.numel == grad.numel() for one in info.regions
            )
            return (info.regions, grad) if grad is not None and not arrives else None
        kept = gradient_of(info)
        if kept is None or (self._registry.is_read_in_parts(info) and kept.numel() != info.numel):
            return None
        return [whole(info)], kept

    def _ask(self) -> None:
        """Ask every parameter for its gradient's address."""
        if self._registry.num_known != len(self._owners):
            infos, copies = self._registry.infos(), self._registry.copies()
            self._owners = [(info, False) for info in infos] + [(info, True) for info in copies]
            self._addresses = [0] * len(self._owners)
            self._spans = np.zeros((len(self._owners), 2), dtype=np.int64)
            self._at = {}
        self._measure(range(len(self._owners)))

    def _measure(self, indices: Iterable[int]) -> bool:
        """Measure gradients that moved. Whether there were any."""
        has_moved = False
        owners, addresses = self._owners, self._addresses
        for index in indices:
            owner, is_copy = owners[index]
            address = address_of(gradient_of(owner) if not is_copy else owner.param.grad)
            if address and not is_copy and self.looked_at is not None:
                self.looked_at(owner)  # another one may lie where an earlier one did
            if address == addresses[index]:
                continue
            has_moved = True
            if self._at.get(addresses[index]) == index:
                del self._at[addresses[index]]
            addresses[index] = address
            place = self._place(owner, is_copy) if address else None
            self._spans[index] = _span(place[1]) if place is not None else (0, 0)
            if address:
                self._at[address] = index
        return has_moved


def address_of(tensor: Tensor | None) -> int:
    """Of the first element of what lies on this rank; 0 where there is no such thing."""
    if tensor is None:
        return 0
    try:
        local: Tensor = tensor if type(tensor) is Tensor else getattr(tensor, "_local_tensor", tensor)
        return local.data_ptr() if local.layout is torch.strided else 0
    except RuntimeError:  # fake, or a wrapper of a transform
        return 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and the one behind the last; (0, 0) where elements do not lie side by side, in
    whatever order."""
    if tensor.layout is not torch.strided or not tensor.data_ptr():
        return 0, 0
    if not (tensor.is_contiguous() or is_dense(tensor)):  # the first is ten times as fast
        return 0, 0
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()

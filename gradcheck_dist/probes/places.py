"""Where gradients lie now, by address: a trainer that asks for one gradient after the other is not to wait for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.probes.regions import Region, gradient_of, whole
from gradcheck_dist.probes.registry import ParamInfo, Registry

Place = tuple[Sequence[Region], Tensor]
"""(what a tensor is made of, the tensor)"""


class Places:
    """Keeps addresses only, never a gradient. What they say is asked of the parameters again, and all are asked where
    it does not account for the whole of a tensor."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._owners: list[tuple[ParamInfo, bool]] = []  # and whether it is an optimizer's copy
        self._addresses: list[int] = []  # of their gradients, 0 where there is none
        self._spans = np.empty((0, 2), dtype=np.int64)

    def overlapping(self, tensor: Tensor) -> list[Place]:
        """The gradients, and the gradients of optimizers' copies, that share memory with a contiguous tensor."""
        begin, end = _span(tensor)
        if begin == end:
            return []
        if self._num_owners() == len(self._owners):
            found, covered = self._found(begin, end)
            if covered:
                return found
        self._ask()
        return self._found(begin, end)[0]

    def _num_owners(self) -> int:
        return len(self._registry.infos()) + len(self._registry.copies())

    def _found(self, begin: int, end: int) -> tuple[list[Place], bool]:
        """What is known to overlap, and whether it is still there and accounts for all of it."""
        found: list[Place] = []
        parts: set[tuple[int, int]] = set()
        for index in np.flatnonzero((self._spans[:, 0] < end) & (self._spans[:, 1] > begin)).tolist():
            place = _place(*self._owners[index])
            first, last = self._spans[index].tolist()
            if place is None or _span(place[1]) != (first, last):
                return [], False
            found.append(place)
            parts.add((max(first, begin), min(last, end)))
        return found, (begin, end) in parts or sum(last - first for first, last in parts) == end - begin

    def _ask(self) -> None:
        """Ask every parameter for its gradient's address; those that moved are measured again."""
        infos, copies = self._registry.infos(), self._registry.copies()
        if self._num_owners() != len(self._owners):
            self._owners = [(info, False) for info in infos] + [(info, True) for info in copies]
            self._addresses = [0] * len(self._owners)
            self._spans = np.zeros((len(self._owners), 2), dtype=np.int64)
        addresses = [_address(info) for info in infos] + [_address(info) for info in copies]
        moved = [index for index, address in enumerate(addresses) if address != self._addresses[index]]
        self._addresses = addresses
        for index in moved:
            place = _place(*self._owners[index])
            self._spans[index] = _span(place[1]) if place is not None else (0, 0)


def _address(info: ParamInfo) -> int:
    param = info.param
    grad = param.grad
    if grad is None:  # with nothing in its place either, most often
        grad = gradient_of(info) if param.__dict__ else None
        return grad.data_ptr() if grad is not None else 0
    local: Tensor = getattr(grad, "_local_tensor", grad)
    return local.data_ptr() if local.layout is torch.strided else 0


def _place(info: ParamInfo, is_copy: bool) -> Place | None:
    if is_copy:
        return (info.regions, info.param.grad) if info.param.grad is not None else None
    kept = gradient_of(info)
    return ([whole(info)], kept) if kept is not None else None


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and the one behind the last; (0, 0) where elements do not lie side by side."""
    if tensor.layout is not torch.strided or not tensor.data_ptr() or not tensor.is_contiguous():
        return 0, 0
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()

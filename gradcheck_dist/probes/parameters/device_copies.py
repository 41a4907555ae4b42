"""Copies of gradients in flat buffers that lie on an accelerator, whose values nobody is to wait for.

In the first step that reduces any they are looked for by value, as on the CPU: that waits, as finding an optimizer's
copies does. A trainer makes the same buffers in each step, so from then on the n-th of one size and type holds what it
held then. Where that is not so, a reduction is told of other parameters than it went over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradcheck_dist.probes.parameters.regions import Region
from gradcheck_dist.probes.parameters.registry import ParamInfo

Buffer = tuple[int, torch.dtype, int]
"""How many elements, of which type, and the how many-th such buffer of the step it is."""


class DeviceCopies:
    """`search` compares a buffer with gradients (and says whether there were any to compare with); `holds_now` tells
    whether a buffer could hold the gradients of some parameters."""

    def __init__(
        self,
        search: Callable[[Tensor, bool, int], tuple[list[Region], bool]],
        holds_now: Callable[[Tensor, Sequence[ParamInfo]], bool],
    ) -> None:
        self._search, self._holds_now = search, holds_now
        self._known: dict[Buffer, list[Region]] = {}
        self._asked: Counter[tuple[int, torch.dtype]] = Counter()
        self._compared = self._settled = False
        self._results: list[tuple[StorageWeakRef, int, int, list[Region]]] = []

    def step_begins(self) -> None:
        self._settled = self._compared
        self._asked.clear()
        self._results.clear()

    def regions(self, tensor: Tensor, *, stacked: bool, scattered: int) -> list[Region]:
        """Which gradients a buffer is a copy of."""
        if again := self.reduced(tensor):
            return again
        kind = (tensor.numel(), tensor.dtype)
        buffer = (*kind, self._asked[kind])
        self._asked[kind] += 1
        if not self._settled:
            self._known[buffer], compared = self._search(tensor, stacked, scattered)
            self._compared |= compared
            return self._known[buffer]
        found = self._known.get(buffer, [])
        return found if self._holds_now(tensor, [region.info for region in found]) else []

    def came_out(self, copied: Sequence[Region], output: Tensor) -> None:
        """Remember where a reduction of a whole copy left its result."""
        self._results.append(
            (StorageWeakRef(output.untyped_storage()), output.data_ptr(), output.numel(), list(copied))
        )

    def reduced(self, tensor: Tensor) -> list[Region]:
        """Whose gradients lie in the result of a reduction of this step."""
        for storage, address, size, regions in self._results:
            if (address, size) == (tensor.data_ptr(), tensor.numel()) and not storage.expired():
                return regions
        return []

"""Norms alone, for those who need nothing else: one pass over memory.

torch's float32 norms on a CPU sum squares in eight numbers. They are off by 5e-3 at 67 M elements, and by 4e-5 at
65 536 where one element is 1e4 times the others. Here squares are summed in float32 within rows of 256 only, as in
stats/cpu.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.stats import cpu, gradients, memory
from gradcheck_dist.stats.inputs import local_tensors
from gradcheck_dist.stats.pending import Pending

_foreach_norm = torch._foreach_norm  # as it was before a probe came to watch it
SHORT = 64 * cpu.ROW
"""Up to so many elements torch's norm in float64 is the faster one, where memory cannot be read as it lies."""
LEAST_MEAN_SQUARE = 1e-30
"""Below this mean, float32 squares may have underflowed."""


class PendingNorms:
    """Norms that are under way. `result()` gives (l2, number of elements that are NaN or infinite), one entry a tensor;
    those elements are left out of the norm."""

    def __init__(self, known: tuple[np.ndarray, np.ndarray] | None, pending: Pending | None) -> None:
        self._known, self._pending = known, pending

    def query(self) -> bool:
        """Whether `result()` returns without waiting."""
        return self._pending is None or self._pending.ready

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._pending is not None:
            self._pending.synchronize()

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The norms, float64, and the counts, int64; waits for the device if it has not come so far."""
        if self._known is not None:
            return self._known
        assert self._pending is not None
        stats = self._pending.result()
        return stats.l2, stats.num_nonfinite


class _Layout:
    """Where the rows of tensors of such sizes lie among those of all. `starts` holds the first of each tensor that has
    elements, `parts` (its index, the whole rows in it, how many elements are left behind these, its first row)."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        counts = [-(-size // cpu.ROW) for size in sizes]
        begins = [0, *np.cumsum(counts).tolist()]
        self.num_rows = begins[-1]
        self.used = [index for index, size in enumerate(sizes) if size]
        self.starts = [begins[index] for index in self.used]
        self.parts = [(index, *divmod(sizes[index], cpu.ROW), begins[index]) for index in self.used]
        self.least: np.ndarray = LEAST_MEAN_SQUARE * np.array(sizes, dtype=np.float64)


_layout = functools.lru_cache(maxsize=64)(_Layout)


@np.errstate(over="ignore", invalid="ignore")
def on_host(tensors: list[Tensor], sizes: list[int], found: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(l2, number of elements that are NaN or infinite) of tensors on the CPU that have these numbers of elements.
    `found`: what `memory.addresses` has just given of them."""
    layout = _layout(tuple(sizes))
    found = found or memory.addresses(tensors, sizes)
    squares = np.zeros(len(tensors)) if found is None else _squares(found, layout, len(tensors))
    if found is None:
        short = [index for index in layout.used if sizes[index] <= SHORT]
        if short:
            with torch.no_grad():
                norms_of_short = _foreach_norm([tensors[index] for index in short], 2.0, torch.float64)
            squares[short] = torch.stack(norms_of_short).numpy() ** 2
        for index in set(layout.used).difference(short):
            squares[index] = cpu.squares(tensors[index])
    counts = np.zeros(len(tensors), dtype=np.int64)
    right = np.isfinite(squares) & (squares >= layout.least)
    if right.all():
        return np.sqrt(squares), counts
    strange = np.flatnonzero(~right)
    stats = cpu.gradient_stats([tensors[index] for index in strange])
    norms = np.sqrt(squares)
    norms[strange], counts[strange] = stats.l2, stats.num_nonfinite
    return norms, counts


def _squares(found: list[int], layout: _Layout, num_tensors: int) -> np.ndarray:
    """Sums of squares of tensors that begin at these addresses."""
    rows = np.empty(layout.num_rows, dtype=np.float32)
    vecdot, stretch = np.vecdot, memory.stretch
    for index, whole, rest, begin in layout.parts:
        if whole:
            table = stretch(found[index], whole * cpu.ROW).reshape(whole, cpu.ROW)
            vecdot(table, table, rows[begin : begin + whole])
        if rest:
            values = stretch(found[index] + 4 * whole * cpu.ROW, rest)
            rows[begin + whole] = values.dot(values)
    squares = np.zeros(num_tensors)
    if layout.starts:
        squares[layout.used] = np.add.reduceat(rows, layout.starts, dtype=np.float64)
    return squares


def start(tensors: Sequence[Tensor]) -> PendingNorms:
    """Norms of tensors on one device; of a DTensor this rank's part.

    Raises:
        ValueError: a tensor is not a dense one of a known floating type.
    """
    local = local_tensors(tensors)
    if any(tensor.device.type != "cpu" for tensor in local):
        return PendingNorms(None, gradients.start(local))
    return PendingNorms(on_host(local, [tensor.numel() for tensor in local]), None)

"""Statistics of gradients on a CPU, in one pass over memory, with numpy's views of torch's memory (DLPack's).

float32 norms of torch's CPU build are off by 6.5e-4 at 16.8 M elements and by 5e-3 at 67 M. Here squares are summed in
float32 within rows of 256 only, and in float64 over rows: longer rows are no faster and lose small elements beside a
large one (4e-7 with rows of 1024). Tensors that are too short for rounding errors to cancel are summed in float64, all
of them together, for a call of numpy costs as much as a thousand elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.stats import memory
from gradcheck_dist.stats.inputs import check_companions, is_dense, local_tensors
from gradcheck_dist.stats.result import GradientStats

ROW = 256
"""Elements whose squares are summed in float32."""
BLOCK = 512 * ROW
"""Elements that are read once from memory and then used from the cache."""
SMALL = 16 * ROW
"""Below this many elements a tensor is pooled with others and summed in float64."""
SAFE_MIN, SAFE_MAX = 1e-12, 1e17
"""Between these largest magnitudes no float32 square of a row that matters under- or overflows."""

L2, ABS_MAX, NONFINITE, ZERO, DOT = range(5)


class CpuStats:
    """Computes statistics; keeps its scratch memory (1.2 MB) from call to call. Not for several threads at once."""

    def __init__(self) -> None:
        self._is_zero = np.empty(BLOCK, dtype=np.bool_)
        self._converted = torch.empty(BLOCK, dtype=torch.float32, device="cpu")
        self._reference = torch.empty(BLOCK, dtype=torch.float32, device="cpu")

    def __call__(
        self,
        tensors: Sequence[Tensor],
        *,
        references: Sequence[Tensor] | None = None,
        positions: Sequence[Tensor | None] | None = None,
    ) -> GradientStats:
        """Statistics of CPU gradients; see reference.gradient_stats for the arguments."""
        tensors = local_tensors(tensors)
        others = None if references is None else local_tensors(references)
        check_companions(tensors, others, positions)
        table = np.zeros((len(tensors), 5))
        samples, counts = [], np.zeros(len(tensors), dtype=np.int64)
        small: list[int] = []
        for index, tensor in enumerate(tensors):
            where = positions[index] if positions is not None else None
            if where is not None:
                samples.append(tensor.take(where).double())
                counts[index] = len(where)
            if tensor.numel() >= SMALL or (tensor.numel() and tensor.dtype is torch.float64):
                self._one(table[index], tensor, others[index] if others is not None else None)
            elif tensor.numel():
                small.append(index)
        if small:
            _pooled(table, small, tensors, others)
        return GradientStats(
            l2=np.sqrt(table[:, L2]),
            abs_max=table[:, ABS_MAX],
            num_nonfinite=table[:, NONFINITE].astype(np.int64),
            num_zero=table[:, ZERO].astype(np.int64),
            dot=table[:, DOT] if others is not None else None,
            samples=torch.cat(samples).numpy() if samples else np.empty(0),
            sample_counts=counts,
        )

    def _one(self, row: np.ndarray, tensor: Tensor, other: Tensor | None) -> None:
        """Adds a tensor's blocks into its row of the table; `row[L2]` holds the sum of squares."""
        flat = _flat(tensor, keep_order=other is not None)
        other_flat = None if other is None else _flat(other, keep_order=True)
        for start in range(0, flat.numel(), BLOCK):
            values = self._read(flat, start, self._converted)
            low, high = float(values.min()), float(values.max())
            largest = max(-low, high)
            is_zero = np.equal(values, 0, out=self._is_zero[: len(values)])
            row[ZERO] += np.count_nonzero(is_zero)
            if largest == 0:
                continue
            if SAFE_MIN < largest < SAFE_MAX:
                row[L2] += sum_of_products(values, values)
                row[ABS_MAX] = max(row[ABS_MAX], largest)
                if other_flat is not None:
                    self._dot(row, values, self._read(other_flat, start, self._reference))
            else:
                self._careful(row, values, other_flat, start)

    def squares(self, tensor: Tensor) -> float:
        """The sum of squares of a tensor with elements, if none of its squares leaves the range of float32: else not
        finite, or too small."""
        flat = _flat(tensor, keep_order=False)
        blocks = (self._read(flat, start, self._converted) for start in range(0, flat.numel(), BLOCK))
        return sum(sum_of_products(block, block) for block in blocks)

    def _dot(self, row: np.ndarray, values: np.ndarray, other: np.ndarray) -> None:
        if values.dtype == other.dtype == np.float32 and np.abs(other).max() < SAFE_MAX:
            row[DOT] += sum_of_products(values, other)
        else:
            finite = np.isfinite(other)
            row[DOT] += np.dot(values[finite].astype(np.float64), other[finite].astype(np.float64))

    def _careful(self, row: np.ndarray, values: np.ndarray, other_flat: Tensor | None, start: int) -> None:
        """A block with NaN, infinities or magnitudes whose squares leave float32: rare, and by the definition."""
        finite = np.isfinite(values)
        used = values[finite].astype(np.float64)
        row[NONFINITE] += len(values) - len(used)
        if len(used):
            row[L2] += np.dot(used, used)
            row[ABS_MAX] = max(row[ABS_MAX], float(np.abs(used).max()))
        if other_flat is not None:
            other = self._read(other_flat, start, self._reference)
            both = finite & np.isfinite(other)
            row[DOT] += np.dot(values[both].astype(np.float64), other[both].astype(np.float64))

    @staticmethod
    def _read(flat: Tensor, start: int, scratch: Tensor) -> np.ndarray:
        """A block as numpy: float32 and float64 as they lie in memory, half precision widened into `scratch`."""
        block = flat[start : start + BLOCK]
        if block.dtype is torch.float64 or block.dtype is torch.float32:
            return memory.flat(block)
        return scratch[: len(block)].copy_(block).numpy()


def sum_of_products(left: np.ndarray, right: np.ndarray) -> float:
    """The inner product, in float32 within rows and in float64 over them."""
    whole = len(left) // ROW * ROW
    rows = np.vecdot(left[:whole].reshape(-1, ROW), right[:whole].reshape(-1, ROW))
    total = float(rows.sum(dtype=np.float64))
    if whole < len(left):
        total += float(np.dot(left[whole:].astype(np.float64), right[whole:].astype(np.float64)))
    return total


def _pooled(table: np.ndarray, which: list[int], tensors: list[Tensor], others: list[Tensor] | None) -> None:
    """The rows of many small, non-empty tensors: laid end to end in float64 and reduced piece by piece."""
    starts = np.cumsum([0, *(tensors[index].numel() for index in which[:-1])])
    values = torch.cat([tensors[index].reshape(-1).double() for index in which]).numpy()
    table[which, ZERO] = np.add.reduceat(values == 0, starts, dtype=np.float64)
    finite = np.isfinite(values)
    if not finite.all():
        table[which, NONFINITE] = np.add.reduceat(~finite, starts, dtype=np.float64)
        values = np.where(finite, values, 0.0)
    table[which, L2] = np.add.reduceat(values * values, starts)
    table[which, ABS_MAX] = np.maximum.reduceat(np.abs(values), starts)
    if others is not None:
        other = torch.cat([others[index].reshape(-1).double() for index in which]).numpy()
        table[which, DOT] = np.add.reduceat(values * np.where(np.isfinite(other), other, 0.0), starts)


def _flat(tensor: Tensor, *, keep_order: bool) -> Tensor:
    """All elements in one dimension, without a copy where memory allows. Only a partner makes their order matter."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not keep_order and is_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.flatten()


gradient_stats = CpuStats()
squares = gradient_stats.squares

"""Norms alone, for those who need nothing else: on a CPU one call of torch for all tensors that it gets right.

torch's float32 norms on a CPU are right to 1.5e-7 up to 65 536 elements in a row (1e-6 in half precision) and get worse
from there (5e-3 at 67 M), so all others go through the chunked statistics, and so do tensors whose squares leave the
range of float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.stats import cpu, gradients
from gradcheck_dist.stats.inputs import local_tensors
from gradcheck_dist.stats.pending import Pending

SMALL = 65_536
_EASY = {torch.float32, torch.float16, torch.bfloat16}
TINY = 1e-12
"""Below this norm squares may have underflowed."""


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


def is_easy(tensor: Tensor) -> bool:
    """Whether torch's own norm of a tensor on the CPU is right."""
    return is_easy_size(tensor.dtype, tensor.numel()) and tensor.is_contiguous()


def is_easy_size(dtype: torch.dtype, num_elements: int) -> bool:
    """The same of contiguous tensors."""
    return dtype in _EASY and num_elements <= SMALL


def easy_norms(tensors: list[Tensor]) -> np.ndarray | None:
    """The l2 norms, float32, of easy tensors on the CPU; None where one is not finite or may have underflowed."""
    values = _foreach_norms(tensors)
    return values if values.min() >= TINY and values.max() < np.inf else None  # no NaN compares


def _foreach_norms(tensors: list[Tensor]) -> np.ndarray:
    with torch.no_grad():
        norms: np.ndarray = torch.stack(torch._foreach_norm(tensors, 2.0, torch.float32)).numpy()
    return norms


def start(tensors: Sequence[Tensor]) -> PendingNorms:
    """Norms of tensors on one device; of a DTensor this rank's part.

    Raises:
        ValueError: a tensor is not a dense one of a known floating type.
    """
    found = local_tensors(tensors)
    if any(tensor.device.type != "cpu" for tensor in found):
        return PendingNorms(None, gradients.start(found))
    norms, counts = np.zeros(len(found)), np.zeros(len(found), dtype=np.int64)
    small = [index for index, tensor in enumerate(found) if is_easy(tensor)]
    rest = set(range(len(found))) - set(small)
    if small:
        values = _foreach_norms([found[index] for index in small])
        norms[small] = values
        strange = ~np.isfinite(values) | (values < TINY)
        rest |= {small[index] for index in np.flatnonzero(strange)}
    if rest:
        chosen = sorted(rest)
        stats = cpu.gradient_stats([found[index] for index in chosen])
        norms[chosen], counts[chosen] = stats.l2, stats.num_nonfinite
    return PendingNorms((norms, counts), None)

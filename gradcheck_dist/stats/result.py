"""What is told of a list of gradients, one entry a tensor. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GradientStats:
    """Columns over the tensors that were given, in their order.

    Elements that are NaN or infinite are counted and left out of everything else: one overflow must not hide the norm
    of the rest. An empty tensor has zeros everywhere.

    Attributes:
        l2: Euclidean norm of the finite elements, float64.
        abs_max: largest magnitude among the finite elements, float64.
        num_nonfinite: elements that are NaN or infinite, int64.
        num_zero: elements that are exactly zero, of either sign, int64.
        dot: inner product with the reference over elements finite in both, float64; None without references.
        samples: the elements at the asked positions, one tensor behind the other, float64; not filtered.
        sample_counts: how many of `samples` belong to each tensor, int64.
    """

    l2: np.ndarray
    abs_max: np.ndarray
    num_nonfinite: np.ndarray
    num_zero: np.ndarray
    dot: np.ndarray | None
    samples: np.ndarray
    sample_counts: np.ndarray

    def __len__(self) -> int:
        return len(self.l2)

    @property
    def total_l2(self) -> float:
        """Norm over all tensors."""
        return float(np.sqrt(np.dot(self.l2, self.l2)))

    def samples_of(self, index: int) -> np.ndarray:
        """The sampled elements of one tensor."""
        start = int(self.sample_counts[:index].sum())
        return self.samples[start : start + int(self.sample_counts[index])]

"""Statistics of gradients on any device by torch's own operations: where there is no triton, or it cannot read a type.

Nothing waits for the device before the end. Norms are accumulated in float64; the price is bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.stats.inputs import check_companions, local_tensors
from gradcheck_dist.stats.pending import Pending
from gradcheck_dist.stats.result import GradientStats


def start(
    tensors: Sequence[Tensor],
    *,
    references: Sequence[Tensor] | None = None,
    positions: Sequence[Tensor | None] | None = None,
) -> Pending:
    """Start the operations and return; see reference.gradient_stats for the arguments."""
    tensors = local_tensors(tensors)
    others = None if references is None else local_tensors(references)
    check_companions(tensors, others, positions)
    rows, samples, counts = [], [], []
    for index, tensor in enumerate(tensors):
        where = positions[index] if positions is not None else None
        counts.append(0 if where is None else len(where))
        if where is not None:
            samples.append(tensor.take(where).double())
        rows.append(_row(tensor, others[index] if others is not None else None))

    def finish(on_host: list[Tensor]) -> GradientStats:
        table = on_host[0].numpy() if rows else np.zeros((0, 5))
        return GradientStats(
            l2=table[:, 0].copy(),
            abs_max=table[:, 1].copy(),
            num_nonfinite=table[:, 2].astype(np.int64),
            num_zero=table[:, 3].astype(np.int64),
            dot=table[:, 4].copy() if others is not None else None,
            samples=on_host[-1].numpy() if samples else np.empty(0),
            sample_counts=np.array(counts, dtype=np.int64),
        )

    columns = [torch.stack(rows)] if rows else []
    return Pending(finish, [*columns, torch.cat(samples)] if samples else columns)


def _row(tensor: Tensor, other: Tensor | None) -> Tensor:
    """l2, largest magnitude, non-finite, zero, inner product: float64, on the tensor's device."""
    if not tensor.numel():
        return torch.zeros(5, dtype=torch.float64, device=tensor.device)
    finite = tensor.isfinite()
    used = torch.where(finite, tensor, 0)
    dot = torch.zeros((), dtype=torch.float64, device=tensor.device)
    if other is not None:
        dot = (used.double() * torch.where(other.isfinite(), other, 0).double()).sum()
    return torch.stack(
        [
            torch.linalg.vector_norm(used, dtype=torch.float64),
            used.abs().max().double(),
            (~finite).sum().double(),
            (tensor == 0).sum().double(),
            dot,
        ]
    )

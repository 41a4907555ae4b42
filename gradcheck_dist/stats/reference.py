"""The plain definition of the statistics, in float64, for tests and small inputs. The fast ways are held to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.stats.inputs import check_companions, local_tensors
from gradcheck_dist.stats.result import GradientStats


def gradient_stats(
    tensors: Sequence[Tensor],
    *,
    references: Sequence[Tensor] | None = None,
    positions: Sequence[Tensor | None] | None = None,
) -> GradientStats:
    """Statistics of gradients by their definition: one float64 copy of each tensor.

    Args:
        tensors: any shapes and strides; of a DTensor this rank's part is read.
        references: tensors of the same shapes to take the inner product with.
        positions: flat positions to gather from each tensor, int64; None in the place of one that has none.

    Raises:
        ValueError: a type that is not read, or companions that do not go with the tensors.
    """
    tensors = local_tensors(tensors)
    references = None if references is None else local_tensors(references)
    check_companions(tensors, references, positions)
    l2, abs_max, num_nonfinite, num_zero, dot, samples = [], [], [], [], [], []
    for index, tensor in enumerate(tensors):
        flat = tensor.double().flatten().cpu()
        finite = flat.isfinite()
        used = flat[finite]
        # The largest magnitude is divided out, so that no square over- or underflows.
        largest = float(used.abs().max()) if used.numel() else 0.0
        l2.append(largest * float((used / largest).square().sum().sqrt()) if largest else 0.0)
        abs_max.append(largest)
        num_nonfinite.append(int((~finite).sum()))
        num_zero.append(int((flat == 0).sum()))
        if references is not None:
            other = references[index].double().flatten().cpu()
            both = finite & other.isfinite()
            dot.append(float((flat[both] * other[both]).sum()))
        where = positions[index] if positions is not None else None
        samples.append(flat[where.cpu()] if where is not None else flat[:0])
    return GradientStats(
        l2=np.array(l2, dtype=np.float64),
        abs_max=np.array(abs_max, dtype=np.float64),
        num_nonfinite=np.array(num_nonfinite, dtype=np.int64),
        num_zero=np.array(num_zero, dtype=np.int64),
        dot=None if references is None else np.array(dot, dtype=np.float64),
        samples=torch.cat(samples).numpy() if samples else np.empty(0),
        sample_counts=np.array([len(values) for values in samples], dtype=np.int64),
    )

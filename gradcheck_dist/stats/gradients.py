"""The door: statistics of a list of gradients, each by the fastest way that its device and type have."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradcheck_dist.stats import cpu, eager
from gradcheck_dist.stats.pending import Pending

Start = Callable[..., Pending]


def start(
    tensors: Sequence[Tensor],
    *,
    references: Sequence[Tensor] | None = None,
    positions: Sequence[Tensor | None] | None = None,
) -> Pending:
    """Start computing l2, largest magnitude, counts, inner products and samples of gradients.

    On an accelerator nothing waits: call `result()` at the end of the step. On a CPU it is computed here.

    Args:
        tensors: gradients on one device; any shapes and strides. Of a DTensor this rank's part is read.
        references: tensors of the same shapes to take the inner product with.
        positions: flat positions to gather from each tensor, int64, on the tensors' device; None where there are none.
    """
    devices = {getattr(tensor, "_local_tensor", tensor).device.type for tensor in tensors}
    if devices <= {"cpu"}:
        stats = cpu.gradient_stats(tensors, references=references, positions=positions)
        return Pending(lambda _: stats, [])
    narrow = all(tensor.dtype != torch.float64 for tensor in [*tensors, *(references or ())])
    begin = _kernel() if devices == {"cuda"} and narrow else None
    return (begin or eager.start)(tensors, references=references, positions=positions)


def implementation(device_type: str) -> str:
    """Which way a device's gradients go: "numpy", "triton" or "torch"."""
    if device_type == "cpu":
        return "numpy"
    return "triton" if device_type == "cuda" and _kernel() is not None else "torch"


@functools.cache
def _kernel() -> Start | None:
    """The kernel's start function, None where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from gradcheck_dist.stats.device import DeviceStats

    return DeviceStats().start

"""Losses that are one mean over elements: mean squared error, binary cross-entropy, a distance with `.mean()`.

They count no tokens. What multiplies the mean in the backward root is known all the same, by the gradient that arrives
at it: 1 where the trainer divides by nothing and weighs it by nothing. Losses of several kinds whose gradients add up
by design (a discriminator's, on real and on generated data) are no means of one kind: they are told by calls from
elsewhere, or by targets that are one number for a whole pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.probes.losses.loss_graph import FACTORS, MAX_FACTORS, OTHERS, name_of, operands_of
from gradcheck_dist.probes.recording.backward_pass import BackwardPass
from gradcheck_dist.probes.recording.sites import calls

MEAN = 1  # torch.nn._reduction.get_enum
_WITH_REDUCTION = {
    *("MseLossBackward", "SmoothL1LossBackward", "HuberLossBackward", "SoftMarginLossBackward"),
    *("BinaryCrossEntropyBackward", "BinaryCrossEntropyWithLogitsBackward"),
}
_DISTANCES = {"PowBackward", "AbsBackward"}


class Passes:
    """`closed_at`: the sequence number of autograd nodes when the last pass was over; what is older was computed before
    it. `calls`: whence the last pass of the step was called, None before its first."""

    def __init__(self) -> None:
        self.closed_at = 0
        self.calls: int | None = None

    def close(self) -> None:
        self.closed_at = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def watch(current: BackwardPass, root: Any, passes: Passes, accumulation_step: int) -> None:
    """Note what arrives at the mean that a root is a multiple of, where it is one that was computed since the last
    pass of the same loop."""
    before, passes.calls = passes.calls if accumulation_step else None, calls()
    node = root
    for num_factors in range(MAX_FACTORS):
        current.num_factors = num_factors
        operands = operands_of(node)
        if name_of(node) not in FACTORS or len(operands) != 1:
            break
        node = operands[0]
    elsewhere = before is not None and before != passes.calls
    if not _is_mean(node) or node._sequence_nr() < passes.closed_at or elsewhere:
        return
    handle = node.register_prehook(functools.partial(_arrived, current, node))
    current.handles.append(handle)


def _is_mean(node: Any) -> bool:
    name = name_of(node)
    if name in _WITH_REDUCTION:
        return bool(node._saved_reduction == MEAN)
    return name == "MeanBackward" and name_of(node.next_functions[0][0]) in {*OTHERS, *_DISTANCES}


def _arrived(current: BackwardPass, node: Any, grads: tuple[Tensor | None, ...]) -> None:
    gradient = grads[0]
    if gradient is None or gradient.numel() != 1:
        return
    current.mean_weight = gradient.detach()
    target = node._saved_target if name_of(node) in _WITH_REDUCTION else None
    if target is not None and target.numel() > 1:
        one_number = (target == target.flatten()[0]).all()
        current.mean_weight = torch.where(one_number, torch.nan, current.mean_weight)

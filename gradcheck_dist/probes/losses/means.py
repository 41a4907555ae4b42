"""Losses that are one mean over elements: mean squared error, binary cross-entropy, a distance with `.mean()`.

They count no tokens. What multiplies the mean in the backward root is known all the same, by the gradient that arrives
at it: 1 where the trainer divides by nothing and weighs it by nothing. Losses of several kinds whose gradients add up
by design (a discriminator's, on real and on generated data) are no means of one kind: they are told by calls from
elsewhere, or by targets that are one number, or one class, for a whole pass.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gradcheck_dist.probes.losses.loss_graph import name_of
from gradcheck_dist.probes.losses.reductions import (
    WITH_REDUCTION,
    Reduced,
    element_weights,
    numbers_above,
    reduced_at,
)
from gradcheck_dist.probes.recording.backward_pass import BackwardPass
from gradcheck_dist.probes.recording.sites import calls

HALF = 0.5


class Passes:
    """`closed_at`: the sequence number of autograd nodes when the last pass was over; what is older was computed before
    it. `calls`: whence the last pass of the step was called, None before its first."""

    def __init__(self) -> None:
        self.closed_at = 0
        self.calls: int | None = None

    def close(self) -> None:
        self.closed_at = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def watch(current: BackwardPass, root: Tensor, passes: Passes, accumulation_step: int, *, elements: bool) -> None:
    """Note what arrives at the mean or sum that a root is a multiple of, where it is one that was computed since the
    last pass of the same loop. `elements`: how many it goes over, too."""
    before, passes.calls = passes.calls if accumulation_step else None, calls()
    edge, current.num_factors = numbers_above(root.grad_fn, root.output_nr)
    found = reduced_at(edge)
    elsewhere = before is not None and before != passes.calls
    if found is None or found.node._sequence_nr() < passes.closed_at or elsewhere:
        return
    current.num_factors += found.numbers
    current.handles.append(found.node.register_prehook(functools.partial(_arrived, current, found)))
    if elements:
        body = found.node if found.body is None else found.body
        current.handles.append(body.register_prehook(functools.partial(_reached, current, found)))


def _arrived(current: BackwardPass, found: Reduced, grads: tuple[Tensor | None, ...]) -> None:
    gradient, node = grads[0], found.node
    if gradient is None or gradient.numel() != 1:
        return
    current.arrived = gradient.detach()
    weight = current.arrived
    target = node._saved_target if name_of(node) in WITH_REDUCTION else None
    if target is not None and target.numel() > 1:
        one_kind = (target == target.flatten()[0]).all()
        if name_of(node).startswith("BinaryCrossEntropy"):
            one_kind |= (target > HALF).all() | (target < HALF).all()
        weight = torch.where(one_kind, torch.nan, weight)
    if not found.is_mean:
        current.arrived = weight
    elif found.is_distance:
        current.mean_weight = weight


def _reached(current: BackwardPass, found: Reduced, grads: tuple[Tensor | None, ...]) -> None:
    if grads[0] is not None and current.arrived is not None:
        current.elements = element_weights(found, current.arrived, grads[0])

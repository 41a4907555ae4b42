"""Losses that arise inside the model, beside the one on its output: how they enter backward.

They are attached to an activation and pass their own gradient on when backward reaches it, so that a pipeline stage
that never sees the main loss trains on them too. Source: Megatron-LM's MoEAuxLossAutoScaler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.trainer.config import TrainConfig


@dataclass(frozen=True)
class AuxiliaryStep:
    """What one optimizer step normalises auxiliary losses by.

    Attributes:
        global_positions: positions of the step on all ranks, padding too: a router sees no labels.
        contributions: evaluations of one rank in the step, K * M.
        later_divisor: see loss.StepTokens; may differ from the main loss's by the loss scale alone.
        loss_scale: what a GradScaler multiplies the main loss by.
        copies: ranks that evaluate the same, and whose gradients are added up: those of tp.
    """

    global_positions: int
    contributions: int
    later_divisor: int
    loss_scale: float = 1.0
    copies: int = 1


def auxiliary_scale(step: AuxiliaryStep) -> float:
    """What the position sum of one microbatch is multiplied by, so that after all later divisions it is a mean."""
    return step.loss_scale * step.later_divisor / (step.global_positions * step.copies)


class AuxiliaryLosses:
    """The auxiliary losses of one model part; its layers hand theirs in, by name, as sums over positions."""

    def __init__(self, config: TrainConfig) -> None:
        self._weights = {
            "load_balance": config.aux_loss_weight,
            "router_z": config.z_loss_weight,
            "contrastive": config.contrastive_loss_weight,
        }
        self.start_step(AuxiliaryStep(global_positions=1, contributions=1, later_divisor=1))

    def start_step(self, step: AuxiliaryStep) -> None:
        """Begin an optimizer step."""
        self._step = step
        self.sums: dict[str, float] = {}

    def attach(self, activation: Tensor, sums: dict[str, Tensor]) -> Tensor:
        """The activation, unchanged; backward through it also goes through the losses, weighted and scaled."""
        from gradcheck_dist.probes import mark_loss

        for name, loss_sum in sums.items():
            if weight := self._weights[name]:
                positions = activation.shape[:-1].numel()
                marked = mark_loss(loss_sum, positions, term=name, coefficient=weight)
                activation = _Attach.apply(activation, marked * (weight * auxiliary_scale(self._step)))
        return activation


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)

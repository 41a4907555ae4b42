"""Faults in what a loss is divided by. Imports no torch.

Notation: N tokens in a step, N_r of them on data-parallel rank r, n_c in one microbatch, R ranks that hold other
tokens (dp_replicate * dp_shard * cp), K accumulation steps, M pipeline microbatches. Right is 1/N for every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradcheck_dist.trainer.fault import Fault

if TYPE_CHECKING:
    from torch import Tensor

    from gradcheck_dist.trainer.auxiliary import AuxiliaryStep
    from gradcheck_dist.trainer.config import TrainConfig
    from gradcheck_dist.trainer.loop import Trainer
    from gradcheck_dist.trainer.loss import StepTokens

_NORMALIZER = "gradcheck_dist.trainer.loss:normalizer"
_FURTHER = "gradcheck_dist.trainer.loss:further_normalizer"
_LATER_DIVISOR = "gradcheck_dist.trainer.parallelize:later_divisor"


def rank_tokens(labels: Tensor, step: StepTokens) -> float:
    """Stands in for loss.normalizer."""
    return step.rank_tokens


def microbatch_tokens(labels: Tensor, step: StepTokens) -> float:
    """Stands in for loss.normalizer."""
    return step.contributions * int((labels >= 0).sum())


def divided_twice(labels: Tensor, step: StepTokens) -> float:
    """Stands in for loss.normalizer."""
    return step.global_tokens / step.later_divisor * step.contributions


def divided_by_one_step(labels: Tensor, step: StepTokens) -> float:
    """Stands in for loss.normalizer."""
    return step.global_tokens / step.later_divisor / step.contributions


def undivided(labels: Tensor, step: StepTokens) -> float:
    """Stands in for loss.normalizer."""
    return 1 / step.later_divisor


def own_valid_tokens(labels: Tensor, step: StepTokens) -> float:
    """Stands in for loss.normalizer."""
    return int((labels >= 0).sum())


def all_positions(labels: Tensor, step: StepTokens) -> float:
    """Stands in for loss.normalizer."""
    return step.contributions * labels.numel()


def further_undivided(step: StepTokens, head: int) -> float:
    """Stands in for loss.further_normalizer."""
    return step.further_tokens[head] / step.later_divisor / step.contributions


def main_tokens(step: StepTokens, head: int) -> float:
    """Stands in for loss.further_normalizer."""
    return step.global_tokens / step.later_divisor


def _averaged(config: TrainConfig) -> int:
    return config.gradient_ranks if config.gradient_reduction == "average" else 1


def all_processes(config: TrainConfig) -> int:
    """Stands in for parallelize.later_divisor."""
    return _averaged(config) * config.axes.world_size // config.gradient_ranks


def times_context(config: TrainConfig) -> int:
    """Stands in for parallelize.later_divisor."""
    return _averaged(config) * config.axes.cp


def gather_without_gradient(features: Tensor) -> Tensor:
    """Stands in for contrastive.gather_features."""
    import torch
    import torch.distributed as dist

    from gradcheck_dist.trainer.contrastive import gathered

    parts = gathered(features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def own_positions(step: AuxiliaryStep) -> float:
    """Stands in for auxiliary.auxiliary_scale."""
    return step.loss_scale * step.later_divisor * step.contributions / (step.global_positions * step.copies)


_total: list[Tensor] = []


def running_total(trainer: Trainer, tokens: Tensor, labels: Tensor) -> None:
    """Stands in for loop.differentiate."""
    from gradcheck_dist.trainer import parallelize

    if all(parameter.grad is None for parameter in trainer.model.parameters()):
        _total.clear()  # a new step
    _total.append(trainer.loss(parallelize.forward(trainer.model, tokens), labels))
    sum(_total[1:], _total[0]).backward(retain_graph=True)


def fused(scores: Tensor, targets: Tensor) -> Tensor:
    """Stands in for loss.sum_of_losses."""
    from gradcheck_dist.trainer.fused_loss import FusedCrossEntropy

    return FusedCrossEntropy.apply(scores, targets)


def fused_gradient_passed_by(scores: Tensor, targets: Tensor) -> Tensor:
    """Stands in for loss.sum_of_losses."""
    from gradcheck_dist.trainer.fused_loss import GradientPassedBy

    return GradientPassedBy.apply(scores, targets)


FAULTS = (
    Fault(
        "fused-loss",
        "The sum over tokens comes from a fused kernel of somebody's own, whose backward is right. Every weight is 1.",
        "gradcheck_dist.trainer.loss:sum_of_losses",
        fused,
    ),
    Fault(
        "fused-loss-gradient-passed-by",
        "The fused kernel computes its gradient in forward and gives that back as it is, without the gradient that "
        "arrives. Every weight is N, over the ranks where an average divides by them.",
        "gradcheck_dist.trainer.loss:sum_of_losses",
        fused_gradient_passed_by,
    ),
    Fault(
        "running-total",
        "The loss is added to a total that goes backward after every accumulation step, with retain_graph since it "
        "fails without. Accumulation step k of K weighs K-k.",
        "gradcheck_dist.trainer.loop:differentiate",
        running_total,
    ),
    Fault(
        "rank-means",
        "Each rank divides by its own tokens of the step and the wrapper averages over ranks (gradient_reduction "
        "'average'): a mean of means. Tokens of rank r weigh N / (R N_r).",
        _NORMALIZER,
        rank_tokens,
    ),
    Fault(
        "microbatch-means",
        "The loss is the mean over each microbatch, divided by their number, and the wrapper averages over ranks "
        "(gradient_reduction 'average'). Tokens of microbatch c weigh N / (R K M n_c).",
        _NORMALIZER,
        microbatch_tokens,
    ),
    Fault(
        "double-accumulation-division",
        "The loss is divided by all tokens of the step, and once more by the number of its parts, as a mean over "
        "microbatches would need it. Every weight is 1/(K M).",
        _NORMALIZER,
        divided_twice,
    ),
    Fault(
        "accumulation-not-divided",
        "Each part of the step divides by its share of the tokens, as if it were a step of its own. Every weight is "
        "K M.",
        _NORMALIZER,
        divided_by_one_step,
    ),
    Fault(
        "loss-divided-after-backward",
        "The pipeline schedule runs backward on the sum over tokens, and the loss is divided when it comes back. Every "
        "weight is N of that step.",
        _NORMALIZER,
        undivided,
    ),
    Fault(
        "model-axes-in-loss-scale",
        "The loss is multiplied by the number of processes to undo the averaging, but ranks along tp and pp see the "
        "same tokens and average nothing. Every weight is tp * pp.",
        _LATER_DIVISOR,
        all_processes,
    ),
    Fault(
        "cp-loss-scaling",
        "The loss is multiplied by cp because each rank sees a part of the sequence only, but it is a sum over tokens "
        "already. Every weight is cp.",
        _LATER_DIVISOR,
        times_context,
    ),
    Fault(
        "rl-denominator",
        "Each policy-gradient microbatch is a mean over its own valid tokens, and nobody divides by the number of "
        "microbatches (gradient_reduction 'average'). Tokens of microbatch c weigh N / (R n_c).",
        _NORMALIZER,
        own_valid_tokens,
    ),
    Fault(
        "padding-counts-as-tokens",
        "The sum over valid tokens is divided by the number of all positions, padding too (gradient_reduction "
        "'average'). Every weight is N over the positions of the step.",
        _NORMALIZER,
        all_positions,
    ),
    Fault(
        "mtp-loss-units",
        "The loss of the multi-token-prediction head is a mean over one microbatch while the main one is a share of "
        "the step's. Its part of the gradient weighs K M, the main loss's part is right.",
        _FURTHER,
        further_undivided,
    ),
    Fault(
        "mtp-other-token-count",
        "The loss of the multi-token-prediction head is divided by the main loss's tokens, and the last ones of each "
        "sequence have no token to predict. Its part weighs as much less.",
        _FURTHER,
        main_tokens,
    ),
    Fault(
        "contrastive-all-gather",
        "Features are gathered by an operation without a gradient, and each rank puts its own back in. What the other "
        "ranks' losses want of a rank's features is lost, before any weight is counted: no weight pattern.",
        "gradcheck_dist.trainer.contrastive:gather_features",
        gather_without_gradient,
    ),
    Fault(
        "aux-loss-not-scaled",
        "The auxiliary losses enter through an autograd function of their own and are means over the microbatch's "
        "positions; nobody divides by the number of microbatches. Their part of the gradient weighs K M, the main "
        "loss's part is right.",
        "gradcheck_dist.trainer.auxiliary:auxiliary_scale",
        own_positions,
    ),
)

"""A loss over the features of all ranks: each sequence's first half is to be known by its second half.

Sources: InfoNCE, arXiv 1807.03748; features gathered over ranks, arXiv 2103.00020.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gradcheck_dist.trainer.auxiliary import AuxiliaryLosses

TEMPERATURE = 0.1


class ContrastiveLoss:
    """Attaches the loss to hidden states [batch, seq, dim], which it hands on unchanged.

    The negatives of a sequence are those of its microbatch on all ranks, all of which are data-parallel.
    """

    def __init__(self, auxiliary: AuxiliaryLosses) -> None:
        self._auxiliary = auxiliary

    def __call__(self, hidden: Tensor) -> Tensor:
        first, second = (F.normalize(half.float().mean(1), dim=-1) for half in hidden.chunk(2, dim=1))
        everywhere = gather_features(second)
        own = dist.get_rank() * len(first) if dist.is_initialized() else 0
        similarity = first @ everywhere.T / TEMPERATURE
        matching = similarity.diagonal(own)
        loss = (similarity.logsumexp(1) - matching).sum()
        # A sequence counts as often as it has positions: auxiliary losses are sums over these.
        return self._auxiliary.attach(hidden, {"contrastive": loss * hidden.shape[1]})


def gather_features(features: Tensor) -> Tensor:
    """Features [batch, dim] of all ranks, [ranks * batch, dim], in the order of ranks; differentiable."""
    return _Gather.apply(features) if dist.is_initialized() else features


def gathered(features: Tensor) -> list[Tensor]:
    """The features of each rank, as numbers alone."""
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.detach().contiguous())
    return parts


class _Gather(torch.autograd.Function):
    """Backward adds up what all ranks' losses want of this rank's features."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.rows = len(features)
        return torch.cat(gathered(features))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        total = grad.contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank() * ctx.rows :][: ctx.rows]

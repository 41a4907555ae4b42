"""Context parallelism: each rank holds a part of every sequence, and attention gathers keys and values.

Source: Llama 3, arXiv 2407.21783, section 3.3.2 (all-gathered K and V). torch's own context_parallel has no CPU kernel
(torch 2.13), so this stands in for it on every device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gradcheck_dist.trainer.data import Batch
from gradcheck_dist.trainer.model import Attention, Decoder


def local_part(batch: Batch, rank: int, degree: int) -> Batch:
    """The `rank`-th of `degree` equal parts of every sequence."""
    return Batch(batch.tokens.chunk(degree, 1)[rank].contiguous(), batch.labels.chunk(degree, 1)[rank].contiguous())


def apply_context_parallel(model: Decoder, group: dist.ProcessGroup, rank: int) -> None:
    """Prepare a model for `local_part` of its sequences, in place."""
    model.seq_len //= group.size()
    model.first_position = rank * model.seq_len
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = ContextAttention(group, model.first_position)
        elif hasattr(module, "sum_over_sequence"):  # a mixture of experts
            module.sum_over_sequence = SumOverGroup(group)  # type: ignore[assignment]
            module.first_position = model.first_position  # type: ignore[assignment]


class ContextAttention:
    """Causal attention of this rank's queries to the keys and values of all ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, first_position: int) -> None:
        self._group, self._first = group, first_position

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (_GatherSequence.apply(part, self._group) for part in (key, value))
        own = torch.arange(self._first, self._first + query.shape[-2], device=query.device)
        visible = torch.arange(key.shape[-2], device=query.device) <= own[:, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)


class SumOverGroup:
    """Adds up a tensor over a group, outside of autograd."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total


class _GatherSequence(torch.autograd.Function):
    """All-gather along the sequence, the last dimension but one; backward adds up what the ranks want."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        parts = [part.contiguous() for part in grad.chunk(ctx.group.size(), dim=-2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None

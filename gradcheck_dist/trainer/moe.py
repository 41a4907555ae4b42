"""A mixture of experts in the place of a feed-forward layer, on one rank or with its experts spread over `ep`.

Sources: Switch Transformer, arXiv 2101.03961 (load-balance loss); ST-MoE, arXiv 2202.08906 (router z-loss);
DeepSeek-V3, arXiv 2412.19437 (balance within each sequence, so that it does not depend on how sequences are spread).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.trainer.auxiliary import AuxiliaryLosses
from gradcheck_dist.trainer.config import TrainConfig


class Experts(nn.Module):
    """SwiGLU experts, each applied to its own rows.

    Parameters may be split along their first dimension over ranks; a rank then gets the rows of its experts only.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        into, out_of = (
            (config.num_experts, config.ffn_dim, config.dim),
            (config.num_experts, config.dim, config.ffn_dim),
        )
        self.w_gate = nn.Parameter(torch.empty(into))
        self.w_up = nn.Parameter(torch.empty(into))
        self.w_down = nn.Parameter(torch.empty(out_of))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows [n, dim], sorted by expert, counts[e] of them for expert e; the same shape."""
        gates, ups, downs = (local_part(weight) for weight in (self.w_gate, self.w_up, self.w_down))
        outputs = [
            F.linear(F.silu(F.linear(part, gates[index])) * F.linear(part, ups[index]), downs[index])
            for index, part in enumerate(rows.split(counts))
        ]
        return torch.cat(outputs)


def local_part(weight: Tensor) -> Tensor:
    """This rank's part of a tensor that may be distributed."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def router_weight(weight: Tensor) -> Tensor:
    """The router's weight, whole. Ranks of tp hold parts of every expert: what reaches it there is a summand."""
    if not hasattr(weight, "to_local"):
        return weight
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[Partial()] * weight.device_mesh.ndim)


class MixtureOfExperts(nn.Module):
    """Each token goes to its top_k experts; [batch, seq, dim] to the same shape.

    Attributes:
        run_experts: how sorted rows reach the experts; expert parallelism puts its own in the place.
        sum_over_sequence: adds up per-sequence counts where context parallelism splits sequences.
        first_position: where in the sequence the tokens begin.
    """

    def __init__(self, config: TrainConfig, auxiliary: AuxiliaryLosses) -> None:
        super().__init__()
        self._num_experts, self._top_k, self._balanced = config.num_experts, config.top_k, config.balanced_routing
        self._seq_len = config.seq_len
        self._auxiliary = auxiliary
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.run_experts: Callable[[Experts, Tensor, Tensor], Tensor] = run_locally
        self.sum_over_sequence: Callable[[Tensor], Tensor] = lambda counts: counts
        self.first_position = 0

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, router_weight(self.router.weight)).float()
        probabilities = scores.softmax(-1)
        chosen = self._balanced_choice(x) if self._balanced else probabilities.topk(self._top_k, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self._num_experts)
        rows = x.flatten(0, 1)[order // self._top_k]
        outputs = self.run_experts(self.experts, rows, counts)
        by_token = torch.empty_like(outputs).index_copy(0, order, outputs).unflatten(0, (*x.shape[:2], self._top_k))
        mixed = (by_token * weights.unsqueeze(-1)).sum(-2)
        return self._auxiliary.attach(mixed, self._losses(scores, probabilities, chosen))

    def _balanced_choice(self, x: Tensor) -> Tensor:
        positions = torch.arange(self.first_position, self.first_position + x.shape[1], device=x.device)
        choice = positions[:, None] * self._top_k + torch.arange(self._top_k, device=x.device)
        return (choice % self._num_experts).expand(x.shape[0], -1, -1)

    def _losses(self, scores: Tensor, probabilities: Tensor, chosen: Tensor) -> dict[str, Tensor]:
        """Sums over the positions of this rank."""
        counts = F.one_hot(chosen, self._num_experts).sum((1, 2)).float()
        share = self.sum_over_sequence(counts) / (self._seq_len * self._top_k)
        balance = self._num_experts * (probabilities * share.unsqueeze(1)).sum()
        return {"load_balance": balance, "router_z": scores.logsumexp(-1).square().sum()}


def run_locally(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """All experts are here."""
    return experts(rows, counts.tolist())  # type: ignore[no-any-return]


class ExpertParallel:
    """Sends rows to the ranks that hold their experts and brings the results back.

    Source: GShard, arXiv 2006.16668; all-to-all in both directions, forward and backward.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        ranks = self._group.size()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        by_source = received.view(ranks, -1)
        sent_sizes, received_sizes = counts.view(ranks, -1).sum(1).tolist(), by_source.sum(1).tolist()
        arrived = _AllToAll.apply(rows, received_sizes, sent_sizes, self._group)
        # Rows come sorted by source and then by expert; experts want them sorted by expert.
        expert_of_row = torch.arange(by_source.shape[1], device=rows.device).repeat(ranks)
        order = expert_of_row.repeat_interleave(received).argsort(stable=True)
        outputs = experts(arrived[order], by_source.sum(0).tolist())
        restored = torch.empty_like(outputs).index_copy(0, order, outputs)
        return _AllToAll.apply(restored, sent_sizes, received_sizes, self._group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (out_sizes, in_sizes), group
        return _exchange(rows, out_sizes, in_sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        out_sizes, in_sizes = ctx.sizes
        return _exchange(grad, in_sizes, out_sizes, ctx.group), None, None, None


def _exchange(rows: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    # gloo scrambles what it writes into a tensor that is not contiguous, without an error.
    received = rows.new_empty(sum(out_sizes), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), out_sizes, in_sizes, group=group)
    return received


SPLIT_OVER_TP = {"w_gate": 1, "w_up": 1, "w_down": 2}
"""The dimension of each expert's weights along which tp splits them: that of the hidden features."""


def apply_expert_parallel(moe: MixtureOfExperts, mesh: Any) -> None:
    """Spread the experts over the mesh's axis ep, and split each over its axis tp where it has one, in place.

    Every rank holds the same weights before.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, weight in list(moe.experts.named_parameters()):
        placements = [Shard(0), Shard(SPLIT_OVER_TP[name])][: mesh.ndim]
        moe.experts.register_parameter(name, nn.Parameter(distribute_tensor(weight.detach(), mesh, placements)))
    moe.run_experts = ExpertParallel(mesh.get_group("ep"))

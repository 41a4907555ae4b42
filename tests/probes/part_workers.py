"""Two stages by hand on two data ranks each, whose distributed optimizers part a tied matrix otherwise, for
test_combined_axes.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from combined_workers import VOCABULARY, WIDTH, token_sum
from torch import Tensor, nn


class Stage(nn.Module):
    """Looks the tied matrix up, or multiplies by it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.word = nn.Parameter(0.3 * torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0)))
        torch.manual_seed(1 + number)
        self.layer = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.embedding(x, self.word) if self.number == 0 else x
        hidden = hidden + torch.tanh(self.layer(hidden)) @ self.layer.weight
        return hidden if self.number == 0 else hidden @ self.word.t()


def train(parted_first: bool, run_dir: str, summed: bool = True) -> None:
    """The tied gradients are summed over stages, and all are reduce-scattered in place; `parted_first`: in the wrong
    order, so that what is summed over stages is reduced on the one and not on the other (as in Megatron-LM#844).
    Without `summed` they are not summed at all, and every rank also looks at a whole model that nobody trains."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    number, lane = divmod(dist.get_rank(), 2)
    within = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][number]
    across, peer = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][lane], (dist.get_rank() + 2) % 4
    with attach(run_dir):
        stage = Stage(number)
        if not summed:
            torch.manual_seed(0)
            looked_at = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
            looked_at(torch.arange(VOCABULARY))
        params = list(stage.parameters())[:: 1 - 2 * number]
        sizes = [param.numel() for param in params]
        whole, weights = torch.zeros(sum(sizes)), torch.cat([param.detach().flatten() for param in params])
        for param, view in zip(params, weights.split(sizes), strict=True):
            param.data = view.view_as(param)
        for param, view in zip(params, whole.split(sizes), strict=True):
            param.main_grad = view.view_as(param)  # type: ignore[attr-defined]
        tied, half = stage.word.main_grad, len(whole) // 2  # type: ignore[attr-defined]
        own = slice(lane * half, lane * half + half)
        shard, part = nn.Parameter(weights[own].clone()), torch.empty(half)
        optimizer = torch.optim.SGD([shard], lr=0.1)
        generator = torch.Generator().manual_seed(lane)
        for _ in range(2):
            whole.zero_()
            for _ in range(2):
                x, y = torch.randint(0, VOCABULARY, (2, 3, 6), generator=generator)
                received = torch.empty(3, 6, WIDTH)
                if number == 0:
                    hidden = stage(x)
                    dist.send(hidden.detach(), peer)
                    dist.recv(received, peer)
                    hidden.backward(received)
                else:
                    dist.recv(received, peer)
                    received.requires_grad_()
                    (token_sum(stage(received), y) / 36).backward()
                    dist.send(received.grad, peer)  # type: ignore[arg-type]
                for param in params:
                    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
                    param.grad = None
            whole.div_(2)
            if summed and not parted_first:
                dist.all_reduce(tied, group=across)
            dist.reduce_scatter_tensor(part, whole, group=within)
            whole[own] = part
            if parted_first:
                dist.all_reduce(tied, group=across)
            shard.grad = whole[own].clone()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_gather_into_tensor(weights, shard.detach(), group=within)
    dist.barrier()
    dist.destroy_process_group()

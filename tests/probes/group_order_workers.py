"""Ranks that reduce gradients one by one, each in an order of its own. Each function here is the body of one rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcheck_dist.probes import attach

STEPS = 2


def wait_for_all(params: list[Tensor], groups: list[dist.ProcessGroup | None]) -> None:
    """Begin all reductions, then wait: over several groups, ranks need not begin them in one order."""
    works = []
    for param, group in zip(params, groups, strict=True):
        assert param.grad is not None
        works.append(dist.all_reduce(param.grad, group=group, async_op=True))
    for work in works:
        assert work is not None
        work.wait()


def in_own_order(variant: str, out: str) -> None:
    """`variant`: "groups" makes one for each parameter, "one group" has that of all ranks, which pairs what differs."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    params: list[Tensor] = list(model.parameters())
    groups = [dist.new_group() if variant == "groups" else None for _ in params]
    if rank == 1:
        params, groups = [params[at] for at in (2, 1, 0, 3)], [groups[at] for at in (2, 1, 0, 3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(out, steps=range(STEPS)):
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            loss = nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(6, (8,)))
            (loss / 2).backward()
            wait_for_all(params, groups)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()

"""DDP's reducer, armed by the program itself where backward runs inside of forward, as Lightning's manual optimization
does it (lightning/pytorch/strategies/ddp.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradcheck_dist.events import Backward, Reduce
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run


class Inside(nn.Module):
    """Its forward runs backward: over a reducer that it arms, or (`arms` False) over none."""

    def __init__(self, arms: bool) -> None:
        super().__init__()
        self.linear, self.arms = nn.Linear(4, 3), arms
        self.wrapped: list[DistributedDataParallel] = []

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.linear(features), labels)
        if self.arms:
            reducer: Any = self.wrapped[0].reducer
            reducer._rebuild_buckets()
            reducer.prepare_for_backward([])
        loss.backward()
        self.wrapped[0].require_backward_grad_sync = False  # or the wrapper arms it again, behind backward
        return loss.detach()


@pytest.mark.parametrize("arms", [True, False])
def test_a_reducer_that_the_program_arms_inside_of_forward_is_seen_to_reduce(arms: bool, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Inside(arms))
        model.module.wrapped.append(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(tmp_path / "run"):
            for _ in range(2):
                model(torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0]))
                model.require_backward_grad_sync = True
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    events = read_run(tmp_path / "run").ranks[0].events
    assert [event.sync for event in events if isinstance(event, Backward)] == [arms, arms]
    assert len([event for event in events if isinstance(event, Reduce) and event.impl == "ddp"]) == 2 * arms

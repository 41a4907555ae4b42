"""Optimizers of tensors that only name shards (torchrec's tables, updated inside of backward) are no gap in a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_process import events_of, judged
from torch import nn
from torch.distributed._shard import sharded_tensor

from gradcheck_dist.events import OptimizerStep, ProbeError
from gradcheck_dist.probes import attach


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Fused(torch.optim.Optimizer):
    """Backward has updated what it names."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Nothing is left to do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """There is no gradient."""


@pytest.mark.parametrize("beside", [False, True])
def test_a_named_shard_is_no_gap(tmp_path: Path, beside: bool) -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 5)
    shard = sharded_tensor.Shard.from_tensor_and_offsets(torch.randn(6, 8), shard_offsets=[0, 0], rank=0)
    table = sharded_tensor.init_from_local_shards([shard], 6, 8)
    fused = Fused([table, nn.Parameter(torch.randn(6, 8))] if beside else [table])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with attach(tmp_path, steps=range(2)):
        for _ in range(3):
            optimizer.zero_grad()
            for k in range(2):
                (F.cross_entropy(net(torch.randn(4, 8)), torch.tensor([0, 1, 2, 3 + k])) / 2).backward()
            fused.step()
            optimizer.step()
    assert not events_of(tmp_path, ProbeError)
    steps = [event.step for event in events_of(tmp_path, OptimizerStep) if event.optimizer == "SGD"]
    assert steps == [0, 1]
    report = judged(tmp_path)
    assert report.verdict == "clean", report.reasons

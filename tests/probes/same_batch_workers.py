"""Ranks whose losses have no labels, for test_same_batch_unlabelled.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradcheck_dist.probes import attach


def train(run_dir: str, how: str, same: bool) -> None:
    """Two steps of two passes. `how`: "ddp", "fsdp2", "by hand" (sums, divided), "dtensor" (tensor parallel), "split"
    (each rank computes half of the hidden layer, which a sum over ranks that hands gradients through puts together).
    `same`: all ranks draw the same batches."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif how == "fsdp2":
        fully_shard(model)
    elif how == "dtensor":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)  # type: ignore[arg-type]
    elif how == "split":
        model = Split(rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 if same else 1 + rank)
    with attach(run_dir):
        for _ in range(2):
            for _ in range(2):
                loss = F.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 4)) / 2
                loss.backward()
            for param in model.parameters() if how == "by hand" else ():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= world
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


class SumForward(torch.autograd.Function):
    """Megatron's reduction behind a row-parallel layer: a sum, whose gradient is handed through."""

    @staticmethod
    def forward(ctx: object, part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Split(nn.Module):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8 // world), nn.Linear(8 // world, 4, bias=False)
        with torch.no_grad():
            torch.manual_seed(10 + rank)
            for param in self.parameters():
                param.normal_(std=0.3)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return SumForward.apply(self.down(self.up(rows).tanh())) + self.bias  # type: ignore[no-any-return, no-untyped-call]

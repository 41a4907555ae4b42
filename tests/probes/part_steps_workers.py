"""Ranks that step by their own part of a reduction, or by learning rates of their own, for test_part_steps.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gradcheck_dist.probes import attach

STEPS, PASSES = 3, 2


def batch(rank: int, step: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of unequal size on ranks."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + k)
    num = 3 + 2 * rank + k
    return torch.randn(num, 6, generator=generator), torch.randint(0, 4, (num,), generator=generator)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def train_parts(run_dir: str, written: bool, divided: bool) -> None:
    """A flat copy is reduce-scattered, each rank writes its part back and steps all, and parts are gathered behind
    the step. `written` is what right trainers do, `divided` what those of sums do not."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        model = model_of()
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)
        sizes = [param.numel() for param in params]
        own = torch.arange(sum(sizes)).chunk(world)[rank]
        for step in range(STEPS):
            optimizer.zero_grad()
            total = sum(len(batch(one, step, k)[1]) for one in range(world) for k in range(PASSES))
            for k in range(PASSES):
                x, y = batch(rank, step, k)
                (F.cross_entropy(model(x), y, reduction="sum") / total).backward()  # type: ignore[no-untyped-call]
            flat, part = torch.cat([param.grad.flatten() for param in params]), torch.empty(len(own))  # type: ignore[union-attr]
            dist.reduce_scatter_tensor(part, flat)
            if divided:
                part /= world
            if written:
                flat[own] = part
            for param, of_param in zip(params, flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                param.grad.copy_(of_param.view_as(param))  # type: ignore[union-attr]
            optimizer.step()
            with torch.no_grad():
                values = torch.cat([param.flatten() for param in params])
                dist.all_gather_into_tensor(values, values[own].clone())
                for param, of_param in zip(params, values.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                    param.copy_(of_param.view_as(param))
    dist.barrier()
    dist.destroy_process_group()


def train_rates(run_dir: str, doubled: bool) -> None:
    """Ranks try learning rates on one batch. `doubled`: one of them doubles its loss as well."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with attach(run_dir):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
        for step in range(STEPS):
            x, y = batch(0, step, 0)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (2 * loss if doubled and rank else loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            reached = loss.detach().clone()
            dist.all_reduce(reached)
    dist.barrier()
    dist.destroy_process_group()

"""Trainers whose losses count elements, on several ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradcheck_dist.probes import attach

NUM_PASSES = 3


def begin() -> tuple[int, int, nn.Module, torch.optim.Optimizer]:
    """The rank, how many there are, a model below DDP that is the same on all of them, and its optimizer. What is drawn
    from here on is the rank's own."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    return rank, world, model, optimizer


def train(divided_by: str, run_dir: str) -> None:
    """One step; each sum of squared errors is divided by the elements of "all" ranks and passes, of them per rank
    ("average", as DDP's own average asks for), or of the "rank" alone. "halved": half of the average's, as a mean."""
    rank, world, model, optimizer = begin()
    batches = [(torch.randn(4 + k + 3 * rank, 6), torch.randn(4 + k + 3 * rank, 4)) for k in range(NUM_PASSES)]
    num = torch.tensor(float(sum(target.numel() for _, target in batches)))
    if divided_by != "rank":
        dist.all_reduce(num)
    if divided_by in ("average", "halved"):
        num /= world
    with attach(run_dir):
        for inputs, target in batches:
            model.require_backward_grad_sync = inputs is batches[-1][0]
            if divided_by == "halved":
                loss = 0.5 * F.mse_loss(model(inputs), target) * (target.numel() / num.item())
            else:
                loss = F.mse_loss(model(inputs), target, reduction="sum") / num.item()
            loss.backward()
        optimizer.step()
    dist.destroy_process_group()


def train_loud(numbers: tuple[float, ...], run_dir: str, rows: tuple[int, int] = (8, 8)) -> None:
    """Steps of two passes whose losses are means over so many rows; rank 1 multiplies its own by a number in each."""
    rank, _, model, optimizer = begin()
    with attach(run_dir):
        for number in numbers:
            for _ in range(2):
                loss = F.mse_loss(model(torch.randn(rows[rank], 6)), torch.randn(rows[rank], 4)) / 2
                (loss * number if rank == 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def train_padded(kept: tuple[int, int], run_dir: str) -> None:
    """One step; each rank's loss is a mean over all of its 8 rows, of which a mask keeps so many."""
    rank, _, model, optimizer = begin()
    with attach(run_dir):
        mask = (torch.arange(8) < kept[rank])[:, None]
        ((model(torch.randn(8, 6)) - torch.randn(8, 4)).abs() * mask).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def train_metrics(times: float, run_dir: str) -> None:
    """Two steps of a mean over all ranks' elements, as a metric keeps it: its sum is the mean of this rank's elements
    times their number; sums are gathered without gradients, and this rank's own is put back. `times` multiplies it."""
    rank, world, model, optimizer = begin()
    with attach(run_dir):
        for _ in range(2):
            target = torch.randn(4 + 3 * rank, 4)
            error = (model(torch.randn(len(target), 6)) - target).square().mean() * target.numel() + torch.tensor(0.0)
            count = torch.tensor(target.numel())
            sums, counts = [torch.zeros(()) for _ in range(world)], [torch.zeros_like(count) for _ in range(world)]
            dist.all_gather(sums, error.detach())
            dist.all_gather(counts, count)
            sums[rank] = error
            mean = torch.stack(sums).sum(0) / torch.stack(counts).sum(0)
            ((0.0 + mean * 1.0) * times).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def train_by_hand(divided: bool, behind: bool, run_dir: str) -> None:
    """One step of means that are divided by the passes, or `behind` these by a line that writes to gradients, which are
    summed over ranks by hand, and `divided` by their number."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    with attach(run_dir):
        for _ in range(NUM_PASSES):
            loss = F.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 4))
            (loss if behind else loss / NUM_PASSES).backward()
        for param in model.parameters():
            if behind and param.grad is not None:
                param.grad /= NUM_PASSES
            dist.all_reduce(param.grad)
            if divided and param.grad is not None:
                param.grad /= world
        optimizer.step()
    dist.destroy_process_group()


def train_divided(passes: int, before: float, behind: float, run_dir: str) -> None:
    """Two steps of means below DDP's average, divided by a number before they go backward, and by one behind that."""
    _, _, model, optimizer = begin()
    with attach(run_dir):
        for _ in range(2):
            for _ in range(passes):
                loss = F.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 4))
                (loss / before if before != 1 else loss).backward()
            for param in model.parameters() if behind != 1 else ():
                assert param.grad is not None
                param.grad /= behind
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def train_tensor_parallel(run_dir: str) -> None:
    """Two steps of a model of which the last bias alone is whole on every rank; no label tells that they have one
    batch."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for _ in range(2):
            for _ in range(NUM_PASSES):
                (F.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 4)) / NUM_PASSES).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def train_sequences(divided_by: str, run_dir: str, of_data: bool = False) -> None:
    """One step of sums of sequences' means, rank r has r sequences more a pass; `of_data`: of a curve. Divided by the
    sequences of "all" ranks and passes, of them per rank ("average"), or of the "rank" alone."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    batches = [torch.randint(0, 9, (2 + k + rank, 6)) for k in range(NUM_PASSES)]
    num = torch.tensor(float(sum(map(len, batches))))
    if divided_by != "rank":
        dist.all_reduce(num)
    if divided_by == "average":
        num /= world
    with attach(run_dir):
        for tokens in batches:
            mask = torch.arange(6)[None] < 2 + torch.arange(len(tokens))[:, None]
            model.require_backward_grad_sync = tokens is batches[-1]
            losses = F.cross_entropy(model(tokens).transpose(1, 2), tokens, reduction="none")
            losses = -F.logsigmoid(-losses) * mask if of_data else losses * mask
            ((losses.sum(1) / mask.sum(1)).sum() / num.item()).backward()
        optimizer.step()
    dist.destroy_process_group()


def train_in_two(coefficient: float, divided: bool, run_dir: str, reduction: str = "mean") -> None:
    """One step of two models behind each other: DDP averages the first one's gradients, and lines of the trainer's sum
    the second one's, which is larger, and may divide by the ranks. Coefficients but 1 multiply the mean."""
    _, world, first, _ = begin()
    second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    for param in second.parameters():
        dist.broadcast(param.data, 0)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with attach(run_dir):
        squares = (second(first(torch.randn(5, 6))) - torch.randn(5, 4)).square()
        loss = squares.mean() if reduction == "mean" else squares.sum()
        (loss if coefficient == 1 else coefficient * loss).backward()
        for param in second.parameters():
            dist.all_reduce(param.grad)
            if divided:
                param.grad /= world
        optimizer.step()
    dist.destroy_process_group()


def train_sharded(reduced_in: str, run_dir: str) -> None:
    """Two steps of three passes below FSDP2, of which only the "last" or the "first" reduces, or each reduces and only
    the "first, over replicas" of two shards does that over replicas."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes, names = ((2, 2), ("replicas", "shards")) if "replicas" in reduced_in else ((2,), ("shards",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    may_reduce = model.set_requires_all_reduce if "replicas" in reduced_in else model.set_requires_gradient_sync
    with attach(run_dir):
        for _ in range(2):
            for k in range(NUM_PASSES):
                may_reduce(k == (NUM_PASSES - 1 if reduced_in == "last" else 0))
                (F.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 4)) / NUM_PASSES).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()

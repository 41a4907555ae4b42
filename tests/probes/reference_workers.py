"""Ranks of a trainer that computes its gradient a second time, to compare the two."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradcheck_dist.probes import attach

PASSES, STEPS = 2, 2
Data = tuple[Tensor, Tensor]


def tokens_of(data: list[Data]) -> int:
    return sum(int((labels >= 0).sum()) for _, labels in data)


def entropy(model: Callable[[Tensor], Tensor], data: Data) -> Tensor:
    return F.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten(), reduction="sum")


def distance(model: Callable[[Tensor], Tensor], data: Data) -> Tensor:
    """A loss that counts nothing."""
    return model(data[0]).pow(2).sum(-1).sqrt().mul(data[1] >= 0).log1p().sum()


def train(run_dir: str, reference: str, fault: str = "") -> float:
    """The largest difference of the two gradients that was seen."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Net()
    other = copy.deepcopy(model)
    if reference == "another model":
        other = Net()
        other.embedding.reset_parameters()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    unseen = reference == "unseen reduction"
    wrapped = model if unseen or fault == "not reduced" else DistributedDataParallel(model)
    loss_of = distance if reference == "counts nothing" else entropy
    worst = 0.0
    with attach(run_dir, objective="global-token-mean"):
        for _ in range(STEPS):
            data = [[batch(of_rank, k) for k in range(PASSES)] for of_rank in range(world)]
            if fault == "same batch":
                data[1] = data[0]
            every = [part for of_rank in data for part in of_rank]
            num_tokens = tokens_of(every)
            for optimizer in optimizers:
                optimizer.zero_grad()
            wanted: list[Tensor] = []
            if reference.startswith("itself"):
                for part in every:
                    (entropy(model, part) / num_tokens).backward()
                wanted = [param.grad.clone() for param in model.parameters() if param.grad is not None]
                for param in model.parameters() if reference == "itself, emptied by hand" else ():
                    param.grad = None
                if reference == "itself":
                    optimizers[0].zero_grad()
            scale = 1 if fault == "averaged twice" or wrapped is model else world
            scale *= PASSES if fault == "not divided" else 1
            for part in data[rank]:
                (loss_of(wrapped, part) / num_tokens * scale).backward()
            if unseen and fault != "not reduced":
                for param in model.parameters():
                    param.grad = functional.all_reduce(param.grad, "sum", dist.group.WORLD)
            if reference == "another model":
                for part in data[rank]:
                    (entropy(other, part) / num_tokens * world).backward()
            elif reference == "asked":
                whole = sum((entropy(other, part) for part in every), torch.zeros(())) / num_tokens
                wanted = list(torch.autograd.grad(whole, list(other.parameters())))
            elif not reference.startswith("itself") and (reference != "on one rank" or rank == 0):
                for part in every:
                    (loss_of(other, part) / num_tokens).backward()
                wanted = [param.grad for param in other.parameters() if param.grad is not None]
            for param, gradient in zip(model.parameters(), wanted, strict=False):
                assert param.grad is not None
                worst = max(worst, float((param.grad - gradient).abs().max() / gradient.abs().max()))
            optimizers[0].step()
            if reference not in ("differentiated", "asked") and not reference.startswith("itself"):
                optimizers[1].step()
            else:
                other.load_state_dict(model.state_dict())
    return worst


def train_one_after_the_other(run_dir: str, first: str, steps: str) -> None:
    """A whole model on each rank for three steps, and DDP, which averages twice, for three others."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    every = [batch(of_rank, k) for of_rank in range(2) for k in range(PASSES)]
    with attach(run_dir, objective="global-token-mean", steps=steps):
        for kind in ("reference", "trainer") if first == "reference" else ("trainer", "reference"):
            model = Net()
            wrapped = DistributedDataParallel(model) if kind == "trainer" else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                for part in every[PASSES * rank :][:PASSES] if kind == "trainer" else every:
                    (entropy(wrapped, part) / tokens_of(every)).backward()
                optimizer.step()
                optimizer.zero_grad()


def lose(run_dir: str) -> None:
    """Two of three passes are emptied, which have as many tokens as the third has on both ranks together."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Net()
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    data = [batch(rank, 3 * rank + k) for k in range(3)]
    for _, labels in data:
        labels[:] = labels.abs() % 20
    with attach(run_dir, objective="global-token-mean"):
        for _ in range(STEPS):
            for part in data:
                optimizer.zero_grad()
                (entropy(wrapped, part) / tokens_of(data)).backward()
            optimizer.step()


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: Tensor) -> Tensor:
        return hidden

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, part: Tensor) -> Tensor:
        part = part.clone()
        dist.all_reduce(part)
        return part

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


INNER = 32
"""As wide as twice the outer features: both halves have one shape."""


class Halves(nn.Module):
    """Two layers, each with a half of the inner features on each rank."""

    def __init__(self, whole: nn.Sequential) -> None:
        super().__init__()
        num = INNER // 2
        half = slice(num * dist.get_rank(), num * dist.get_rank() + num)
        self.embedding, up, down, self.head = copy.deepcopy(whole)
        self.up, self.down = nn.Linear(16, num, bias=False), nn.Linear(num, 16, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(up.weight[half])
            self.down.weight.copy_(down.weight[:, half])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(_Sum.apply(self.down(self.up(_Copies.apply(hidden)))))


def train_halves(run_dir: str, stepped: bool, fault: str = "") -> float:
    """Tensor parallelism by hand, beside the whole model."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    up, down = nn.Linear(16, INNER, bias=False), nn.Linear(INNER, 16, bias=False)
    other = nn.Sequential(nn.Embedding(20, 16), up, down, nn.Linear(16, 20))
    model = Halves(other)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    data = [batch(0, k) for k in range(PASSES)]
    scale = PASSES if fault == "not divided" else 1
    worst = 0.0
    with attach(run_dir, objective="global-token-mean"):
        for _ in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in data:
                (entropy(model, part) / tokens_of(data) * scale).backward()
                (entropy(other, part) / tokens_of(data)).backward()
            gradient = other[-1].weight.grad
            assert isinstance(gradient, Tensor) and model.head.weight.grad is not None
            worst = max(worst, float((model.head.weight.grad - gradient).abs().max() / gradient.abs().max()))
            for optimizer in optimizers[: 1 + stepped]:
                optimizer.step()
            if not stepped:
                break
    return worst

"""Ranks whose optimizer reduces gradients in its own step, updates a part and sends it, for test_reduced_inside.py.

Distributed Muon and Adam do so (modded-nanogpt, nanochat).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from probe_workers import Net, batch, token_sum, with_and_without
from torch import Tensor

STEPS, ACCUMULATION = 2, 3
AVERAGE = dist.ReduceOp.AVG
Reduced = Callable[[], dict[Tensor, Tensor]]
"""Waits for what was reduced: of each parameter that this rank updates, its gradient."""


def each(params: list[Tensor], *, later: bool = True, group: Any = None, op: Any = AVERAGE) -> Reduced:
    """An all-reduce of each, of which every rank updates its turn."""
    works = [dist.all_reduce(param.grad, op=op, group=group, async_op=later) for param in params]

    def reduced() -> dict[Tensor, Tensor]:
        for work in works if later else ():
            work.wait()
        return mine(params)

    return reduced


def by_future(params: list[Tensor]) -> Reduced:
    futures = [dist.all_reduce(param.grad, op=AVERAGE, async_op=True).get_future() for param in params]

    def reduced() -> dict[Tensor, Tensor]:
        for future in futures:
            future.wait()
        return mine(params)

    return reduced


def mine(params: list[Tensor]) -> dict[Tensor, Tensor]:
    return {param: param.grad for param in params[dist.get_rank() :: dist.get_world_size()] if param.grad is not None}


def to_owners(params: list[Tensor]) -> Reduced:
    for index, param in enumerate(params):
        dist.reduce(param.grad.div_(dist.get_world_size()), index % dist.get_world_size())
    return lambda: mine(params)


def listed(params: list[Tensor]) -> Reduced:
    """A reduce-scatter of as many gradients of one shape as there are ranks, each of which goes to another."""
    works = []
    for index in range(0, len(params), dist.get_world_size()):
        turn = params[index : index + dist.get_world_size()]
        grads = [param.grad for param in turn if param.grad is not None]
        works.append(dist.reduce_scatter(grads[dist.get_rank()], grads, op=AVERAGE, async_op=True))

    def reduced() -> dict[Tensor, Tensor]:
        for work in works:
            work.wait()
        return mine(params)

    return reduced


def all_but_one(params: list[Tensor]) -> Reduced:
    reduced = each(params[1:])

    def and_mine() -> dict[Tensor, Tensor]:
        reduced()
        return mine(params)

    return and_mine


def stacked(params: list[Tensor]) -> Reduced:
    """A reduce-scatter of a copy of all gradients, which have one shape: the first goes to rank 0."""
    copy = torch.stack([param.grad for param in params if param.grad is not None])
    part = torch.empty_like(copy[:1])
    work = dist.reduce_scatter_tensor(part, copy, op=AVERAGE, async_op=True)

    def reduced() -> dict[Tensor, Tensor]:
        work.wait()
        return {params[dist.get_rank()]: part[0]}

    return reduced


HOW: dict[str, Callable[[list[Tensor]], Reduced]] = {
    "right": each,
    "right at once": lambda params: each(params, later=False),
    "right by future": by_future,
    "right to owners": to_owners,
    "right as a list": listed,
    "right as a stack": stacked,
    "summed": lambda params: each(params, op=dist.ReduceOp.SUM),
    "averaged twice": each,
    "each alone": lambda params: each(params, group=ALONE[dist.get_rank()]),
    "behind the step": lambda params: lambda: mine(params),
    "not all": all_but_one,
    "handed on": each,
    "summed and handed on": each,
}
ALONE: list[Any] = []


class Parted(torch.optim.Optimizer):
    """Nesterov's momentum in place, as Muon has it: what lies in `.grad` behind the step is no gradient any more."""

    def __init__(self, params: list[Tensor], how: Callable[[list[Tensor]], Reduced]) -> None:
        super().__init__(params, {"lr": 0.1})
        self._how = how

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            reduced = self._how(group["params"])()
            for param, grad in reduced.items():
                kept = self.state[param].setdefault("momentum", torch.zeros_like(grad))
                kept.lerp_(grad, 0.05)
                param.sub_(grad.lerp_(kept, 0.95).sign(), alpha=group["lr"])
            for index, param in enumerate(group["params"]):
                dist.broadcast(param.data, index % dist.get_world_size())


class HandedOn(torch.optim.SGD):
    """Sums gradients in its own step, and lets its parent update what came."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            dist.all_reduce(param.grad)
        return super().step(closure)


def train(variant: str) -> int:
    model = Net()
    if variant in ("right as a list", "right as a stack"):  # of two that have one shape
        model.inner.requires_grad_(False)
        model.head.bias.requires_grad_(False)
    if variant == "each alone":
        ALONE[:] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    params = [param for param in model.parameters() if param.requires_grad]
    handed_on = variant.endswith("handed on")
    optimizer = HandedOn(params, lr=0.1) if handed_on else Parted(params, HOW[variant])
    world = dist.get_world_size()
    for step in range(STEPS):
        data = [batch(dist.get_rank(), k + step) for k in range(ACCUMULATION)]
        count = torch.tensor(float(sum((labels >= 0).sum() for _, labels in data)))
        dist.all_reduce(count)
        for part in data:
            (token_sum(model, part) * (1 if variant in ("averaged twice", "handed on") else world) / count).backward()
        optimizer.step()
        if variant == "behind the step":
            for param in model.parameters():
                dist.all_reduce(param.grad, op=AVERAGE)
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def run(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, HOW, folder)

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
    "right in parts": each,
    "in parts that stay away": each,
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


class InParts(torch.optim.SGD):
    """Each rank writes its part of the reduced gradients back, leaves the others' parts as they were, steps by all of
    them and takes the others' parts of the parameters from their ranks."""

    def reduce(self, *, written: bool) -> None:
        params = self.param_groups[0]["params"]
        whole = torch.cat([param.grad.flatten() for param in params])
        size = -(-len(whole) // dist.get_world_size())
        padded = torch.cat([whole, torch.zeros(size * dist.get_world_size() - len(whole))])
        part = torch.empty(size)
        dist.reduce_scatter_tensor(part, padded)
        begin = size * dist.get_rank()
        if written:
            mine = whole[begin : begin + size]
            mine.copy_(part[: len(mine)])
        for param, grad in zip(params, whole.split([param.numel() for param in params]), strict=True):
            param.grad.copy_(grad.view_as(param))

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        params = [param.detach() for param in self.param_groups[0]["params"]]
        whole = torch.cat([param.flatten() for param in params])
        size = -(-len(whole) // dist.get_world_size())
        padded = torch.cat([whole, torch.zeros(size * dist.get_world_size() - len(whole))])
        every = torch.empty_like(padded)
        dist.all_gather_into_tensor(every, padded.chunk(dist.get_world_size())[dist.get_rank()].clone())
        for param, value in zip(params, every[: len(whole)].split([p.numel() for p in params]), strict=True):
            param.copy_(value.view_as(param))


def train(variant: str) -> int:
    model = Net()
    if variant in ("right as a list", "right as a stack"):  # of two that have one shape
        model.inner.requires_grad_(False)
        model.head.bias.requires_grad_(False)
    if variant == "each alone":
        ALONE[:] = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    params = [param for param in model.parameters() if param.requires_grad]
    handed_on = variant.endswith("handed on")
    in_parts = "in parts" in variant
    optimizer: Any = HandedOn(params, lr=0.1) if handed_on else Parted(params, HOW[variant])
    if in_parts:
        optimizer = InParts(params, lr=0.1)
    world = dist.get_world_size()
    for step in range(STEPS):
        data = [batch(dist.get_rank(), k + step) for k in range(ACCUMULATION)]
        count = torch.tensor(float(sum((labels >= 0).sum() for _, labels in data)))
        dist.all_reduce(count)
        for part in data:
            asked = 1 if variant in ("averaged twice", "handed on") or in_parts else world
            (token_sum(model, part) * asked / count).backward()
        if in_parts:
            optimizer.reduce(written=variant == "right in parts")
        optimizer.step()
        if variant == "behind the step":
            for param in model.parameters():
                dist.all_reduce(param.grad, op=AVERAGE)
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def run(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, HOW, folder)

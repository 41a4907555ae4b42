"""Two models of one trainer, for test_combined_inside.py: DDP reduces the one. Nobody reduces the other's gradients:
its optimizer combines what it made of them in its own step, or a line what that left, or nobody anything."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, token_sum, with_and_without
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def averaged(made: Tensor) -> Tensor:
    dist.all_reduce(made)
    return made / dist.get_world_size()


def voted(made: Tensor) -> Tensor:
    votes = made.sign()
    dist.all_reduce(votes)
    return votes.sign()


def alone(made: Tensor) -> Tensor:
    return made


class Combining(torch.optim.Optimizer):
    """Momentum, of which an update is made."""

    def __init__(self, params: list[nn.Parameter], update: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
            momentum.mul_(0.9).add_(param.grad)
            param.sub_(self.update(momentum.clone()), alpha=self.param_groups[0]["lr"])


def critic_loss(critic: nn.Module, rank: int, step: int, counted: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    states, wanted = torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)
    if counted:
        return F.cross_entropy(critic(states), wanted)
    return (critic(states) - F.one_hot(wanted, 4)).abs().pow(1.5).sum()


UPDATES = {
    "votes": voted,
    "alone": alone,
    "signs alone": torch.sign,
    "averaged behind": alone,
    "averaged at times": alone,
    "sent behind": alone,
}


def _is_joined(how: str, step: int) -> bool:
    return how.endswith("behind") or (how == "averaged at times" and step == 1)


def train(variant: str) -> int:
    how, _, of = variant.partition(", ")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Net())
    critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    own = [*critic.parameters()]
    outer: torch.optim.Optimizer
    outer = torch.optim.Adam(own, lr=0.01) if how == "adam alone" else Combining(own, UPDATES.get(how, averaged))

    def policy(step: int) -> None:
        data = [batch(one, step) for one in range(size)]
        num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
        (token_sum(model, data[rank]) * size / num_tokens).backward()

    def update(step: int, optimizer: torch.optim.Optimizer) -> None:
        if how == "warm up" and optimizer is outer:
            outer.param_groups[0]["lr"] = 0.01 * step
        if how == "alone later" and step == STEPS - 1 and isinstance(outer, Combining):
            outer.update = alone
        optimizer.step()
        optimizer.zero_grad()
        for param in own if _is_joined(how, step) and optimizer is outer else ():
            if how.startswith("averaged"):
                dist.all_reduce(param.data)
                param.data /= size
            else:
                dist.broadcast(param.data, 0)

    for step in range(STEPS):
        if how == "first":
            critic_loss(critic, rank, step, of == "counted").backward()
            update(step, outer)
        policy(step)
        if of == "in turn":
            update(step, inner)
        if how != "first":
            critic_loss(critic, rank, step, of != "uncounted").backward()
        if of != "in turn":
            update(step, inner)
        if how != "first":
            update(step, outer)
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in (*model.parameters(), *own)))


HOW = ("momentum", "first", "warm up", "alone later", *UPDATES, "adam alone")
VARIANTS = tuple(f"{how}, {of}" for how in HOW for of in ("counted", "uncounted", "in turn"))


def run(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)

"""Two ranks of one batch, an expert on each, to which they send tokens that both hold, for test_swapped_copies.py."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from exchange_functions import Copy, GatherSliced, Scatter, Sum, Swap
from probe_workers import Net, batch, token_sum, with_and_without
from torch import Tensor, nn

VARIANTS = ("parted", "whole", "whole, divided", "functional, parted", "functional, whole")


class Routed(nn.Module):
    """Each token goes to one expert; "parted": each rank sends its own part of the tokens, (ranks, tokens, width)."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.parted = "parted" in variant
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, 1)
        chosen = torch.stack([torch.arange(len(x)) % 2 == rank for rank in range(2)])[..., None]
        sent = x * chosen
        sent = Scatter.apply(sent) if self.parted else sent
        made = Swap.apply(torch.tanh(self.expert(Swap.apply(sent))))
        made = GatherSliced.apply(made) if self.parted else made
        return (x + (made * chosen).sum(0)).view(shape)


class Dispatched(Routed):
    """The same, of which only a token's own row is sent, by torch's functional all-to-all: unequal parts."""

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(0, 1)
        mine = torch.arange(len(x)) % 2 == dist.get_rank() if self.parted else torch.ones(len(x), dtype=torch.bool)
        to_second = torch.arange(len(x))[mine] % 3 > 0
        rows = (Copy.apply(x) if self.parted else x)[mine][to_second.long().argsort(stable=True)]
        sent = [int((~to_second).sum()), int(to_second.sum())]
        received = torch.empty(2, dtype=torch.long)
        dist.all_to_all_single(received, torch.tensor(sent))
        given = functional.all_to_all_single_autograd(rows, received.tolist(), sent, dist.group.WORLD)
        back = functional.all_to_all_single_autograd(
            torch.tanh(self.expert(given)), sent, received.tolist(), dist.group.WORLD
        )
        made = torch.zeros_like(x).index_copy(0, mine.nonzero().flatten()[to_second.long().argsort(stable=True)], back)
        return (x + (Sum.apply(made) if self.parted else made)).view(shape)


def train(variant: str) -> int:
    model = Net()
    model.inner = Dispatched(variant) if "functional" in variant else Routed(variant)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        data = [batch(0, 2 * step + k) for k in range(2)]
        total = sum(int((labels >= 0).sum()) for _, labels in data)
        for part in data:
            (token_sum(model, part) / total).backward()
        if "divided" in variant:
            model.inner.expert.weight.grad.div_(2)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def train_all(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)

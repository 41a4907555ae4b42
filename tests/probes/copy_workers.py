"""Two ranks of one batch, an expert on each, to which they send tokens that both hold, for test_swapped_copies.py."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from exchange_functions import GatherSliced, Scatter, Swap
from probe_workers import Net, batch, token_sum, with_and_without
from torch import Tensor, nn

VARIANTS = ("parted", "whole", "whole, divided")


class Routed(nn.Module):
    """Each token goes to one expert; "parted": each rank sends its own part of the tokens, (ranks, tokens, width)."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.parted = variant == "parted"
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


def train(variant: str) -> int:
    model = Net()
    model.inner = Routed(variant)  # type: ignore[assignment]
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

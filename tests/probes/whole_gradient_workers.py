"""Two ranks that hold each their part of a sequence behind a trained feature of every position, for
test_whole_gradients.py: backward gathers the feature's gradient, so that all ranks have the whole of it."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exchange_functions import Gather, GatherSliced, Sum, function, gathered, own_part
from probe_workers import Net, batch, with_and_without
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

VARIANTS = (
    "whole, averaged",
    "whole, summed",
    "whole, summed, losses added up",
    "whole, divided, summed",
    "own part",
)
UNREDUCED = ("whole, by nobody", "whole, of others, by nobody")
LENGTH = 12


Part = function("Part", own_part, gathered)
PartDivided = function("PartDivided", own_part, lambda grad: gathered(grad) / 2)


class Placed(Net):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.1 * torch.randn(1, LENGTH, 16))
        self.part = own_part if "own" in variant else (PartDivided if "divided" in variant else Part).apply

    def forward(self, tokens: Tensor) -> Tensor:
        mine = self.embedding(own_part(tokens)) + self.part(self.positions)
        mine = torch.tanh(self.inner(mine))
        return self.head(mine + Gather.apply(mine).mean(1, keepdim=True))


def train(variant: str) -> int:
    model = Placed(variant)
    for name, param in model.named_parameters():
        if "averaged" not in variant or name != "positions":
            param.register_hook(lambda grad: grad * 2.0)  # what DDP's average takes
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens, labels = batch(0, step)
        labels = labels.roll(3, 1)  # some of each rank
        logits, mine = wrapped(tokens).flatten(0, 1), own_part(labels).flatten()
        loss = F.cross_entropy(logits, mine, reduction="sum") / (labels >= 0).sum()
        loss = Sum.apply(loss) if "added up" in variant else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


class Recurrent(Net):
    """A layer that both ranks compute on the whole sequence, which they gather; each goes on with its own part."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        mine = torch.tanh(self.inner(self.embedding(own_part(tokens))))
        return self.head(mine + Part.apply(torch.tanh(self.wide(GatherSliced.apply(mine))).cumsum(1)))


def train_unreduced(variant: str) -> int:
    """What is whole on each rank is reduced by nobody; "of others": and the head is not, of which each has a part."""
    torch.manual_seed(0)
    model = Recurrent()
    apart = ("wide", "head") if "of others" in variant else ("wide",)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        tokens, labels = batch(0, step)
        labels = labels.roll(3, 1)
        logits, mine = model(tokens).flatten(0, 1), own_part(labels).flatten()
        (F.cross_entropy(logits, mine, reduction="sum") / (labels >= 0).sum()).backward()
        for name, param in model.named_parameters():
            if not name.startswith(apart):
                dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def train_all_unreduced(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train_unreduced, UNREDUCED, folder)


def train_all(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)

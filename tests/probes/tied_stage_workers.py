"""Two stages by hand, of which the last one holds a norm and a matrix alone, for test_tied_stages.py."""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn

WIDTH, WORDS, MICROBATCHES, ROWS, LENGTH, STEPS = 16, 32, 3, 2, 8, 2
TOKENS = MICROBATCHES * ROWS * LENGTH
VARIANTS = ("summed", "left", "left, a line halves", "not tied")


class Stage(nn.Module):
    """Looks a matrix up, or multiplies by it. Both draw it from one seed, or each from its own (not tied)."""

    def __init__(self, rank: int, variant: str) -> None:
        super().__init__()
        torch.manual_seed(rank if variant == "not tied" else 0)
        values = torch.randn(WORDS, WIDTH)
        if rank == 0:
            self.table = nn.Embedding(WORDS, WIDTH, _weight=values)
            self.layer = nn.Linear(WIDTH, WIDTH)
        else:
            self.norm = nn.LayerNorm(WIDTH)
            self.word = nn.Parameter(values)

    @property
    def shared(self) -> Tensor:
        return self.table.weight if hasattr(self, "table") else self.word

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = (
            self.layer(self.table(given)) if hasattr(self, "table") else F.linear(self.norm(given), self.word)
        )
        return output


def train(variant: str) -> int:
    rank = dist.get_rank()
    stage = Stage(rank, variant)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        ids, labels = torch.randint(WORDS, (2, MICROBATCHES, ROWS, LENGTH), generator=data)
        for microbatch in range(MICROBATCHES):
            run(stage, rank, ids[microbatch], labels[microbatch])
        grad = stage.shared.grad
        assert isinstance(grad, Tensor)
        if variant == "summed":
            dist.all_reduce(grad)
        if "a line halves" in variant and rank == 0:
            grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in stage.parameters()))


def run(stage: Stage, rank: int, ids: Tensor, labels: Tensor) -> None:
    """One microbatch, forward and backward."""
    if rank == 0:
        output = stage(ids)
        dist.send(output.detach(), 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, 1)
        output.backward(gradient)
    else:
        given = torch.empty(ROWS, LENGTH, WIDTH)
        dist.recv(given, 0)
        loss = F.cross_entropy(stage(given.requires_grad_()).flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS
        loss.backward()
        assert given.grad is not None
        dist.send(given.grad, 0)


def train_all(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)

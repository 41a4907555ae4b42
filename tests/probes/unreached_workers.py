"""Ranks of loops by hand in which parameters are left out on one rank or all, for test_unreached.py."""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, with_and_without

STEPS = 2
VARIANTS = ("not reduced", "not reached", "left out of reduce")


class HalfBiased(Net):
    def forward(self, tokens: torch.Tensor, unbiased: bool) -> torch.Tensor:
        hidden = torch.tanh(self.inner(self.embedding(tokens)))
        return F.linear(hidden, self.head.weight) if unbiased else self.head(hidden)


def train(variant: str) -> int:
    """Variants: "not reduced" (none is), "not reached" (nor by the second rank's loss the head's bias), "left out of
    reduce" (this bias alone, where rank 0 gets the sum and hands it on)."""
    model, rank = HalfBiased(), dist.get_rank()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    bias = model.head.bias
    for step in range(STEPS):
        data = batch(rank, step)
        count = torch.tensor(float((data[1] >= 0).sum()))
        dist.all_reduce(count)
        logits = model(data[0], variant == "not reached" and rank == 1).flatten(0, 1)
        (F.cross_entropy(logits, data[1].flatten(), reduction="sum") / count).backward()
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if variant == "left out of reduce" and param is not bias:
                dist.reduce(param.grad, 0)
                dist.broadcast(param.grad, 0)
        torch.nn.utils.clip_grad_norm_(params, 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in params))


def run(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)

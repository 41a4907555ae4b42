"""Loops that add ranks up by hand and divide by them on lines of their own, with faults that befall all gradients
alike, for test_written_divisors.py."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, with_and_without
from torch import nn

STEPS, PASSES = 3, 2


def unseen(model: nn.Module, factor: float) -> None:
    """Multiply where no probe looks."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad.numpy()[...] *= factor


def seen(model: nn.Module, factor: float) -> None:
    """Multiply on one line, wherever this is called."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(factor)  # the helper


def change(model: nn.Module, factor: str) -> None:
    if factor.startswith("seen "):
        seen(model, float(factor.removeprefix("seen ")))
    elif factor != "1":
        unseen(model, float(factor))


def each(model: nn.Module, size: int) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= size * PASSES  # the division


def in_two(model: nn.Module, size: int) -> None:
    for param in model.parameters():
        param.grad /= PASSES
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= size


def flat(model: nn.Module, size: int) -> None:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    buffer = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(buffer)
    buffer /= size * PASSES
    for grad, part in zip(grads, buffer.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def clip(model: nn.Module, norm: float) -> None:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    unseen(model, min(1.0, norm / float(torch.stack([grad.norm() for grad in grads]).norm())))


REDUCE: dict[str, Callable[[nn.Module, int], None]] = {"each": each, "in two": in_two, "flat": flat}


def train(variant: str) -> int:
    """`how to reduce, factor before it, factor behind it, norm of a clip`"""
    how, before, behind, norm = variant.split(", ")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for index in range(PASSES):
            generator = torch.Generator().manual_seed(100 * rank + PASSES * step + index)
            tokens, labels = torch.randint(0, 20, (2, 24), generator=generator)
            F.cross_entropy(model(tokens), labels).backward()
        change(model, before)
        REDUCE[how](model, size)
        change(model, behind)
        if norm != "0":
            clip(model, float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


CHANGED = (
    *("1, 1, 0", "3, 1, 0", "1, 0.7, 0", "3, 0.7, 0", "0.3, 0.7, 0", "1, 1, 0.01", "3, 1, 0.01", "3, 1, 0.0123"),
    *("seen 3, 1, 0", "1, seen 0.7, 0", "3, seen 0.7, 0", "seen 3, seen 0.7, 0"),
)
VARIANTS = tuple(f"{how}, {changed}" for how in REDUCE for changed in CHANGED)


def run(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)

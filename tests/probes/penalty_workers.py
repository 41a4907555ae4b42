"""Ranks that go backward through a penalty on their parameters behind what their wrapper reduced."""

import contextlib
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, with_and_without
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 2
VARIANTS = ("tokens", "chunks", "chunks by hand", "chunks, by rank", "chunks, of data", "chunks, summed")


def penalty(model: nn.Module) -> Tensor:
    return torch.stack([param.pow(2).sum() for param in model.parameters()]).sum()


def backward_in_chunks(model: nn.Module, wrapped: nn.Module, chunks: list[Tensor]) -> None:
    """A contrastive loss, differentiated up to features, and these chunk by chunk."""
    with torch.no_grad():
        features = torch.cat([model(chunk).mean(1) for chunk in chunks])
    features.requires_grad_()
    F.cross_entropy(features @ features.T, torch.arange(len(features)).roll(1)).backward()
    assert features.grad is not None
    gradients = features.grad.split([len(chunk) for chunk in chunks])
    for k, (chunk, gradient) in enumerate(zip(chunks, gradients, strict=True)):
        reduces = isinstance(wrapped, DistributedDataParallel) and k < len(chunks) - 1
        with wrapped.no_sync() if reduces else contextlib.nullcontext():  # type: ignore[operator]
            (wrapped(chunk).mean(1) * gradient).sum().backward()


def train(variant: str) -> int:
    """Variants: what is reduced, and what comes behind it."""
    model = Net()
    by_hand = variant == "chunks by hand" or "summed" in variant
    wrapped = model if by_hand else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        data = [batch(rank, 2 * step + k) for k in range(2)]
        if variant == "tokens":
            count = (data[0][1] >= 0).sum().float()
            dist.all_reduce(count)
            logits = wrapped(data[0][0]).flatten(0, 1)
            (F.cross_entropy(logits, data[0][1].flatten(), reduction="sum") * world / count).backward()
        else:
            backward_in_chunks(model, wrapped, [tokens for tokens, _ in data])
        if "summed" in variant:
            (0.01 * penalty(model)).backward()
        if by_hand:
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= 1 if "summed" in variant else world  # type: ignore[operator]
        if "of data" in variant:
            model(data[0][0]).pow(2).mean().backward()
        elif "summed" not in variant:
            (0.01 * (rank + 1 if "by rank" in variant else 1) * penalty(model)).backward()
        optimizer.step()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def run(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)

"""Ranks that look at the gradient of a held-out batch, one for all of them, beside what they train on."""

import copy
import zlib

import torch
import torch.distributed as dist
from probe_workers import Net, batch, token_sum, with_and_without
from torch.nn.parallel import DistributedDataParallel

STEPS = 2
VARIANTS = ("a copy", "returned", "put back", "returned, of all", "returned, one batch", "a copy, one batch")


def train(variant: str) -> int:
    """Variants: whose gradient of the held-out batch it is, or how it is kept out of `.grad`."""
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    held_out = batch(world, STEPS)
    for step in range(STEPS):
        own = batch(0 if "one batch" in variant else rank, step)
        if "of all" in variant:  # the step's own gradient once more, to compare the two
            tokens, labels = zip(*[batch(one, step) for one in range(world)], strict=True)
            held_out = (torch.cat(tokens), torch.cat(labels))
        count = (own[1] >= 0).sum().float()
        dist.all_reduce(count)
        optimizer.zero_grad()
        (token_sum(wrapped, own) * world / count).backward()
        if "returned" in variant:
            torch.autograd.grad(token_sum(model, held_out), list(model.parameters()))
        elif "a copy" in variant:
            token_sum(copy.deepcopy(model), held_out).backward()
        else:
            kept = [param.grad.clone() for param in model.parameters()]
            optimizer.zero_grad()
            token_sum(model, held_out).backward()
            for param, gradient in zip(model.parameters(), kept, strict=True):
                param.grad = gradient
        optimizer.step()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def run(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)

"""Ranks of a loop that keeps reduced gradients in tensors of its own, as ZeRO 2 does, for test_kept_gradients.py."""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, token_sum, with_and_without
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS, ACCUMULATION = 2, 3
VARIANTS = ("right", "clipped", "clipped each", "halved")


def train(variant: str) -> int:
    """Variants: "right", "clipped" (the whole, by hand), "clipped each" (by parameter), "halved"."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = dist.get_world_size()
    for step in range(STEPS):
        data = [batch(dist.get_rank(), k + step) for k in range(ACCUMULATION)]
        count = torch.tensor(float(sum((labels >= 0).sum() for _, labels in data)))
        dist.all_reduce(count)
        kept = [torch.zeros_like(param) for param in model.parameters()]
        for part in data:
            (token_sum(model, part) * world / count).backward()
            for param, own in zip(model.parameters(), kept, strict=True):
                dist.all_reduce(param.grad.div_(world))
                own.add_(param.grad)
                param.grad = None
        if variant == "halved":
            kept = [0.5 * own for own in kept]
        if variant == "clipped each":
            kept = [own * (0.01 / own.norm()) for own in kept]
        if variant == "clipped":
            norm = torch.stack([own.norm() for own in kept]).norm()
            kept = [own * (0.01 / norm) for own in kept]
        for param, own in zip(model.parameters(), kept, strict=True):
            param.grad = own
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def train_wrapped(variant: str) -> int:
    """Gradients that a wrapper has reduced are kept aside and come back. Variants: "ddp"; "sharded", of whose head the
    loss reads one row, so that all others' gradients are zeros; "unwrapped", whose gradients nobody reduces."""
    model = wrapped = Net()
    world = dist.get_world_size()
    if variant == "ddp":
        wrapped = DistributedDataParallel(model)
    elif variant == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        data = [batch(dist.get_rank(), k + step) for k in range(ACCUMULATION)]
        count = torch.tensor(float(sum((labels >= 0).sum() for _, labels in data)))
        dist.all_reduce(count)
        kept = {}
        for tokens, labels in data:
            if variant != "sharded":
                loss = token_sum(wrapped, (tokens, labels)) * world / count
            else:
                loss = F.mse_loss(wrapped(tokens)[..., 0], torch.ones(tokens.shape)) / ACCUMULATION
            loss.backward()
            for param in wrapped.parameters():
                kept[param] = kept[param] + param.grad if param in kept else param.grad.clone()
            wrapped.zero_grad()
        for param, own in kept.items():
            param.grad = own
        optimizer.step()
        optimizer.zero_grad()
    read = [getattr(param, "_local_tensor", param).detach().numpy() for param in model.parameters()]
    return zlib.crc32(b"".join(one.tobytes() for one in read))


def run_wrapped(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train_wrapped, ("ddp", "sharded", "unwrapped"), folder)


def run(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)

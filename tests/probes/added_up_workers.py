"""Ranks that reduce gradients into tensors of their own, and add these up there from pass to pass."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.probes import attach

VOCABULARY, WIDTH, ACCUMULATION, STEPS = 37, 16, 3, 2
VARIANTS = ("flat", "flat, divided", "each", "each, divided", "each, kept")


def train_all(folder: str) -> list[tuple[float, float]]:
    """The sum of the trained parameters of every variant, without probes and with them."""
    dist.init_process_group("gloo")
    return [(train(variant, None), train(variant, Path(folder) / variant)) for variant in VARIANTS]


def padded(tensors: list[Tensor], size: int) -> Tensor:
    count = sum(tensor.numel() for tensor in tensors)
    return torch.cat([*(tensor.detach().flatten() for tensor in tensors), torch.zeros(-count % size)])


def train(variant: str, run_dir: Path | None) -> float:
    """`flat`: all parameters are one buffer, of which each rank has a shard; else each parameter is parted. `divided`:
    every result is divided by the ranks, which the loss does already. `kept`: `.grad` is not emptied between passes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()),
        *(nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
    )
    params = list(model.parameters())
    groups = [params] if variant.startswith("flat") else [[param] for param in params]
    shards = [nn.Parameter(padded(list(group), size).chunk(size)[rank].clone()) for group in groups]
    optimizer = torch.optim.AdamW(shards, lr=1e-3)
    generator = torch.Generator().manual_seed(100 + rank)
    with attach(run_dir) if run_dir is not None else contextlib.nullcontext():
        for _ in range(STEPS):
            lengths = torch.randint(6, 14, (ACCUMULATION,), generator=generator).tolist()
            num_tokens = torch.tensor(2.0 * sum(lengths))
            dist.all_reduce(num_tokens)
            sums = [torch.zeros_like(shard) for shard in shards]
            for length in lengths:
                tokens = torch.randint(VOCABULARY, (2, length + 1), generator=generator)
                logits = model(tokens[:, :-1]).flatten(0, 1)
                (F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / num_tokens).backward()
                for group, total in zip(groups, sums, strict=True):
                    given = torch.empty_like(total)
                    dist.reduce_scatter_tensor(
                        given, padded([param.grad for param in group if param.grad is not None], size)
                    )
                    if "divided" in variant:
                        given /= size
                    total.add_(given)
                for param in params if "kept" not in variant else ():
                    param.grad = None
            for shard, total in zip(shards, sums, strict=True):
                shard.grad = total.clone()
            optimizer.step()
            model.zero_grad()
            with torch.no_grad():
                for group, shard in zip(groups, shards, strict=True):
                    whole = torch.empty(size * shard.numel())
                    dist.all_gather_into_tensor(whole, shard.detach())
                    for param in group:
                        part, whole = whole[: param.numel()], whole[param.numel() :]
                        param.copy_(part.view_as(param))
    return sum(param.double().sum().item() for param in params)

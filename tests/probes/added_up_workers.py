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
VARIANTS = (
    "flat",
    "flat, divided",
    "flat, left",
    "flat, faded",
    "each",
    "each, divided",
    "each, kept",
    "flat, kept for ever",
)


def train_all(folder: str) -> list[tuple[float, float]]:
    """The sum of the trained parameters of every variant, without probes and with them."""
    dist.init_process_group("gloo")
    return [(train(variant, None), train(variant, Path(folder) / variant)) for variant in VARIANTS]


HOOKED = ("clipped", "overwritten")


def train_hooked(folder: str) -> list[tuple[float, float]]:
    """The same of loops whose hooks reduce as soon as the last gradient of a layer is there."""
    dist.init_process_group("gloo")
    return [(in_hooks(variant, None), in_hooks(variant, Path(folder) / variant)) for variant in HOOKED]


def padded(tensors: list[Tensor], size: int) -> Tensor:
    count = sum(tensor.numel() for tensor in tensors)
    return torch.cat([*(tensor.detach().flatten() for tensor in tensors), torch.zeros(-count % size)])


def train(variant: str, run_dir: Path | None) -> float:
    """`flat`: all parameters are one buffer, of which each rank has a shard; else each parameter is parted. `divided`:
    every result is divided by the ranks, which the loss does already. `kept`: `.grad` is not emptied between passes;
    `for ever`: nor between steps. `left`: what results are added to is not emptied between steps; `faded`: it is halved
    there."""
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
    sums = [torch.zeros_like(shard) for shard in shards]
    generator = torch.Generator().manual_seed(100 + rank)
    with attach(run_dir) if run_dir is not None else contextlib.nullcontext():
        for _ in range(STEPS):
            lengths = torch.randint(6, 14, (ACCUMULATION,), generator=generator).tolist()
            num_tokens = torch.tensor(2.0 * sum(lengths))
            dist.all_reduce(num_tokens)
            if "left" not in variant:
                for total in sums:
                    total.mul_(0.5 if "faded" in variant else 0.0)
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
            if "for ever" not in variant:
                model.zero_grad()
            with torch.no_grad():
                for group, shard in zip(groups, shards, strict=True):
                    whole = torch.empty(size * shard.numel())
                    dist.all_gather_into_tensor(whole, shard.detach())
                    for param in group:
                        part, whole = whole[: param.numel()], whole[param.numel() :]
                        param.copy_(part.view_as(param))
    return sum(param.double().sum().item() for param in params)


class Unit:
    """A layer's parameters, of which each rank has a shard. Its last gradient in a backward pass has all of them
    averaged and added to the shard's; `overwrites`: they take its place."""

    def __init__(self, layer: nn.Module, *, overwrites: bool) -> None:
        self.params, self.overwrites, self.waiting = list(layer.parameters()), overwrites, 0
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shard = nn.Parameter(padded(list(self.params), self.size).chunk(self.size)[self.rank].clone())
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, _: Tensor) -> None:
        self.waiting = (self.waiting + 1) % len(self.params)
        if self.waiting:
            return
        flat = padded([param.grad for param in self.params if param.grad is not None], self.size) / self.size
        given = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(given, flat)
        self.shard.grad = given if self.shard.grad is None or self.overwrites else self.shard.grad + given
        for param in self.params:
            param.grad = None


def in_hooks(variant: str, run_dir: Path | None) -> float:
    """`clipped`: by hand, to a norm that is far below the gradient's."""
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, VOCABULARY)]
    model = nn.Sequential(*layers)
    units = [Unit(layer, overwrites=variant == "overwritten") for layer in layers]
    optimizer = torch.optim.AdamW([unit.shard for unit in units], lr=1e-3)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    with attach(run_dir) if run_dir is not None else contextlib.nullcontext():
        for _ in range(STEPS):
            lengths = torch.randint(6, 14, (ACCUMULATION,), generator=generator).tolist()
            num_tokens = torch.tensor(2.0 * sum(lengths))
            dist.all_reduce(num_tokens)
            for length in lengths:
                tokens = torch.randint(VOCABULARY, (2, length + 1), generator=generator)
                logits = model(tokens[:, :-1]).flatten(0, 1)
                loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
                (loss * dist.get_world_size() / num_tokens).backward()
            if variant == "clipped":
                squares = torch.stack([unit.shard.grad.square().sum() for unit in units if unit.shard.grad is not None])
                total = squares.sum()
                dist.all_reduce(total)
                for unit in units:
                    if unit.shard.grad is not None:
                        unit.shard.grad.mul_(0.1 / (total.sqrt() + 1e-6))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for unit in units:
                    whole = torch.empty(unit.size * unit.shard.numel())
                    dist.all_gather_into_tensor(whole, unit.shard.detach())
                    for param in unit.params:
                        part, whole = whole[: param.numel()], whole[param.numel() :]
                        param.copy_(part.view_as(param))
    return sum(param.double().sum().item() for param in model.parameters())

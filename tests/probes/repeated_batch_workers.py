"""Two ranks that reduce gradients by hand, with batches of their own, with one, or with one whose work they divide."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from clip_workers import Added, Copied
from torch import nn

CLASSES, WIDTH, TOKENS, PASSES, STEPS = 12, 8, 10, 2, 2
VARIANTS = ("own batches", "one batch", "one batch, not reduced", "shards of one seed")
PARTED = ("added up", "by the last pass's tokens", "added up twice")


def train(variant: str, run_dir: str) -> None:
    from gradcheck_dist.probes import attach

    rank, ranks, sharded = dist.get_rank(), dist.get_world_size(), "shards" in variant
    with attach(run_dir):
        torch.manual_seed(0)
        inner = WIDTH // ranks if sharded else WIDTH
        body, up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        head = nn.Linear(WIDTH, CLASSES)
        params = [param for module in (body, up, down, head) for param in module.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1)
        data = torch.Generator().manual_seed(rank if variant == "own batches" else 7)
        for _ in range(STEPS):
            for _ in range(PASSES):
                features, labels = (
                    torch.randn(TOKENS, WIDTH, generator=data),
                    torch.randint(CLASSES, (TOKENS,), generator=data),
                )
                hidden = body(features)
                middle = down(torch.tanh(up(Copied.apply(hidden) if sharded else hidden)))
                loss = F.cross_entropy(head(Added.apply(middle) if sharded else middle), labels, reduction="sum")
                (loss / (PASSES * TOKENS)).backward()
            for param in params if "not reduced" not in variant else ():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= ranks
            optimizer.step()
            optimizer.zero_grad()


def train_parted(variant: str, run_dir: str) -> None:
    """ZeRO 2 by hand, where each rank has one batch for all passes: every pass is reduce-scattered and added to a
    buffer, which is divided by the tokens of all passes, or of one, or of half of what was added."""
    from gradcheck_dist.probes import attach

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        params = list(model.parameters())
        flat = torch.cat([param.detach().flatten() for param in params])
        sizes = [param.numel() for param in params]
        for param, part in zip(params, flat.split(sizes), strict=True):
            param.data = part.view_as(param)
        own = nn.Parameter(flat.chunk(ranks)[rank].clone())
        optimizer = torch.optim.SGD([own], lr=0.1)
        data = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            features = torch.randn(TOKENS, WIDTH, generator=data)
            labels = torch.randint(CLASSES, (TOKENS,), generator=data)
            kept = torch.zeros_like(own)
            for _ in range(PASSES + 1):
                F.cross_entropy(model(features), labels, reduction="sum").backward()
                piece = torch.empty_like(own)
                dist.reduce_scatter_tensor(piece, torch.cat([param.grad.flatten() for param in params]))
                for _ in range(1 + ("twice" in variant)):
                    kept += piece
                for param in params:
                    param.grad = None
            own.grad = kept / (ranks * TOKENS * (1 if "last" in variant else PASSES + 1))
            optimizer.step()
            dist.all_gather_into_tensor(flat, own.detach())


def train_all(folder: str) -> None:
    dist.init_process_group("gloo")
    for variant in VARIANTS:
        train(variant, f"{folder}/{variant}")
    for variant in PARTED:
        train_parted(variant, f"{folder}/{variant}")
    dist.barrier()
    dist.destroy_process_group()

"""Two ranks that reduce gradients by hand, with batches of their own, with one, or with one whose work they divide."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from clip_workers import Added, Copied
from torch import nn

CLASSES, WIDTH, TOKENS, PASSES, STEPS = 12, 8, 10, 2, 2
VARIANTS = ("own batches", "one batch", "one batch, not reduced", "shards of one seed")


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


def train_all(folder: str) -> None:
    dist.init_process_group("gloo")
    for variant in VARIANTS:
        train(variant, f"{folder}/{variant}")
    dist.barrier()
    dist.destroy_process_group()

"""Two ranks that reduce gradients by hand, some in tensors of their own, for test_own_sums.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, SAMPLES, PASSES, STEPS = 8, 6, 3, 3
CLASSES = 7
LINES = "lines"
VARIANTS = ("right", "not divided by passes", "divided by ranks twice", "added twice")


def train(variant: str, run_dir: str) -> None:
    from gradcheck_dist.probes import attach

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, 4))
        params = list(model.parameters())
        copies = [nn.Parameter(param.detach().clone()) for param in params]
        sums = [torch.zeros_like(copy) for copy in copies]
        optimizer = torch.optim.AdamW(copies, lr=0.01, foreach=False)
        data = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            for _ in range(PASSES):
                features, targets = (torch.randn(SAMPLES, size, generator=data) for size in (WIDTH, 4))
                loss = F.mse_loss(model(features), targets)
                grads = torch.autograd.grad(loss if "passes" in variant else loss / PASSES, params)
                for one, grad in zip(sums, grads, strict=True):
                    one.add_(grad)
                    if variant == "added twice":
                        one.add_(grad)
            for _ in range(1 + ("ranks" in variant)):
                torch._foreach_div_(sums, ranks)
            for work in [dist.all_reduce(one, async_op=True) for one in sums]:
                work.wait()
            for copy, one in zip(copies, sums, strict=True):
                copy.grad = one
            nn.utils.clip_grad_norm_(copies, 12.0)
            optimizer.step()
            with torch.no_grad():
                for param, copy, one in zip(params, copies, sums, strict=True):
                    param.copy_(copy)
                    one.zero_()


def train_lines(run_dir: str) -> None:
    """As many passes as ranks, by which losses are divided once, and gradients twice."""
    from gradcheck_dist.probes import attach

    rank, world_size = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, CLASSES))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.Generator().manual_seed(rank)
        accum = world_size
        for _ in range(STEPS):
            for _ in range(accum):
                features = torch.randn(SAMPLES, WIDTH, generator=data)
                labels = torch.randint(CLASSES, (SAMPLES,), generator=data)
                loss = F.cross_entropy(model(features), labels) / accum
                loss.backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad.div_(world_size)
                param.grad.div_(world_size)
                dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()


def train_all(folder: str) -> None:
    dist.init_process_group("gloo")
    for variant in VARIANTS:
        train(variant, f"{folder}/{variant}")
    train_lines(f"{folder}/{LINES}")
    dist.barrier()
    dist.destroy_process_group()

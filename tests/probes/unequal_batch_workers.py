"""Ranks whose batches are of unequal size, and which reduce gradients by hand, of losses that count little."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.probes import attach

STEPS, WIDTH, CLASSES = 3, 12, 7
VARIANTS = (
    "shares, coefficient",
    "shares, coefficient, halved",
    "shares, learned",
    "shares, learned, tripled",
    "shares, labels learned",
    "sums, doubled",
    "given",
    "given, alone",
    "given, tripled",
    "learned, clipped",
    "learned, doubled",
)


def train_all(folder: str) -> list[tuple[float, float]]:
    """The sum of the trained parameters of every variant, without probes and with them."""
    dist.init_process_group("gloo")
    return [(train(variant, None), train(variant, Path(folder) / variant)) for variant in VARIANTS]


class Net(nn.Module):
    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.scale = nn.Parameter(torch.full((8, 8), 0.1)) if learned else None

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.body(rows)
        return logits


def backward(variant: str, model: Net, rows: Tensor, labels: Tensor) -> None:
    """`coefficient`: 0.7 times a mean of squares; `learned`: a loss of labels, or a curve, times a learned number.
    `sums`: over labels. `given`: the gradient of a distance, of which the root is told."""
    logits = model(rows)
    if "given" in variant:
        wanted = F.one_hot(labels, CLASSES).float()
        (gradient,) = torch.autograd.grad(F.mse_loss(logits, wanted), [logits], retain_graph=True)
        logits.backward(gradient / gradient.norm())
        return
    if "sums" in variant:
        (F.cross_entropy(logits, labels, reduction="sum") * (1 + ("doubled" in variant) * dist.get_rank())).backward()
    elif model.scale is not None and "labels" in variant:
        (F.cross_entropy(logits, labels) * model.scale.exp().mean()).backward()
    elif model.scale is not None:
        ((logits.square().mean() + logits.exp().mean()) * model.scale.exp().mean()).backward()
    else:
        (0.7 * (logits - F.one_hot(labels, CLASSES)).square().mean()).backward()


def train(variant: str, run_dir: Path | None) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net("learned" in variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(10 + rank)
    with attach(run_dir) if run_dir is not None else contextlib.nullcontext():
        for step in range(STEPS):
            sizes = [8 + 4 * rank + step + k for k in range(3)] if "sums" in variant else [8 + 4 * rank]
            num = sum(sizes)
            every = torch.tensor(float(num))
            dist.all_reduce(every)
            for one in sizes:
                rows = torch.randn(one, WIDTH, generator=generator)
                labels = torch.randint(CLASSES, (one,), generator=generator)
                backward(variant, model, rows, labels)
            params = [param for param in model.parameters() if param.grad is not None]
            if "clipped" in variant:
                nn.utils.clip_grad_norm_(params, 0.01 + 0.01 * rank)
            share = num / float(every) if "shares" in variant else 1 / size
            share = 1 / float(every) if "sums" in variant else share
            for param in params:
                assert param.grad is not None
                if "doubled" in variant and "learned" in variant:
                    if rank == 1:
                        param.grad.mul_(size)
                    dist.all_reduce(param.grad)
                    param.grad.div_(size)
                    continue
                if "tripled" in variant and rank == 1:
                    param.grad.mul_(3)
                param.grad = param.grad * (share * (0.5 if "halved" in variant else 1.0))
                if "alone" not in variant:
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
    return sum(float(param.detach().double().sum()) for param in model.parameters())

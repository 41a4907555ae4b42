"""Two encoders whose features ranks gather by a function that averages in backward. `train_all` is the body of one
rank."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradcheck_dist.probes import attach

VARIANTS = ("both", "both times ranks", "both times ranks, summed", "mean times ranks")
ROWS, WIDTH, STEPS = 6, 8, 2


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, averages: bool) -> Tensor:
        ctx.averages = averages
        parts = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad / dist.get_world_size() if ctx.averages else grad.clone()
        dist.all_reduce(grad)
        return grad[ROWS * dist.get_rank() :][:ROWS], None


class Encoders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, WIDTH), nn.Linear(10, WIDTH)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)


def train(variant: str, run_dir: Path | None) -> float:
    """`both` ways' losses are added up, or their `mean` is taken. `summed`: the gather does not average."""
    torch.manual_seed(0)
    raw, rank = Encoders(), dist.get_rank()
    generator = torch.Generator().manual_seed(100 + rank)
    with attach(run_dir) if run_dir is not None else contextlib.nullcontext():
        model = DistributedDataParallel(raw)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        own, labels = slice(ROWS * rank, ROWS * (rank + 1)), torch.arange(ROWS) + ROWS * rank
        for _ in range(STEPS):
            images, texts = torch.randn(ROWS, 12, generator=generator), torch.randn(ROWS, 10, generator=generator)
            image, text = (Gather.apply(one, "summed" not in variant) for one in model(images, texts))
            loss = F.cross_entropy(10 * image[own] @ text.t(), labels)
            loss = loss + F.cross_entropy(10 * text[own] @ image.t(), labels)
            if "mean" in variant:
                loss = loss / 2
            if "times" in variant:
                loss = loss * dist.get_world_size()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return sum(param.double().sum().item() for param in raw.parameters())


def train_all(folder: str) -> list[tuple[float, float]]:
    dist.init_process_group("gloo")
    sums = [(train(variant, None), train(variant, Path(folder) / variant)) for variant in VARIANTS]
    dist.destroy_process_group()
    return sums

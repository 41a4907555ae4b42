"""A network and parts of it, which each of two ranks trains on its own batch. `train_all` is the body of one rank."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gradcheck_dist.probes import attach

VARIANTS = (
    *("predicted", "predicted summed", "predicted divided", "predicted divided summed"),
    *("regressed", "regressed summed", "regressed divided", "regressed divided summed", "regressed batches"),
)
WIDTHS = (24, 16, 8)
STEPS = 2


class Sliceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.width = nn.Linear(8, 24), nn.Linear(24, 6), 24

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(x, self.up.weight[: self.width], self.up.bias[: self.width]))
        return F.linear(hidden, self.down.weight[:, : self.width], self.down.bias)


def train(variant: str, run_dir: Path | None) -> float:
    """`predicted`: the whole learns labels, its parts what it predicted; `regressed`: all of them numbers. `divided` by
    their number; `summed`: no average over ranks. `batches`: no parts, but batches that are accumulated."""
    torch.manual_seed(0)
    model = Sliceable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    with attach(run_dir) if run_dir is not None else contextlib.nullcontext():
        for _ in range(STEPS):
            x, labels = torch.randn(5, 8, generator=generator), torch.randint(0, 6, (5,), generator=generator)
            numbers = torch.randn(5, 6, generator=generator)
            wanted = None
            for width in WIDTHS:
                if "batches" in variant:
                    x, numbers = torch.randn(5, 8, generator=generator), torch.randn(5, 6, generator=generator)
                else:
                    model.width = width
                outputs = model(x)
                if variant.startswith("regressed"):
                    loss = F.mse_loss(outputs, numbers)
                elif wanted is None:
                    loss, wanted = F.cross_entropy(outputs, labels), outputs.detach().softmax(-1)
                else:
                    loss = -(wanted * F.log_softmax(outputs, -1)).sum(-1).mean()
                (loss / len(WIDTHS) if "divided" in variant else loss).backward()  # type: ignore[no-untyped-call]
            for param in model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                if "summed" not in variant:
                    param.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
    return sum(param.double().sum().item() for param in model.parameters())


def train_all(folder: str) -> list[tuple[float, float]]:
    dist.init_process_group("gloo")
    sums = [(train(variant, None), train(variant, Path(folder) / variant)) for variant in VARIANTS]
    dist.destroy_process_group()
    return sums

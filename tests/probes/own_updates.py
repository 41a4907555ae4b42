"""A loop on one process that a test updates by hand, for test_own_optimizers.py and test_dividing_optimizers.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

STEPS, ACCUMULATION, RATE = 4, 3, 0.1
Update = Callable[[nn.Module], None]


def grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def train(
    update: Update, divisor: float = 1.0, *, folder: Path | None = None, after: Update | None = None
) -> list[float]:
    """Parameters' sums. `divisor` divides each loss once more; `after` runs behind each backward pass."""
    torch.manual_seed(0)
    model = Net()

    def loop() -> None:
        for _ in range(STEPS):
            data = [batch(0, k) for k in range(ACCUMULATION)]
            num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
            for tokens, labels in data:
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
                (loss / num_tokens / divisor).backward()
                if after is not None:
                    after(model)
            update(model)

    if folder is None:
        loop()
    else:
        with attach(folder, steps=range(STEPS - 1)):
            loop()
    return [float(param.detach().double().sum()) for param in model.parameters()]


def judged(folder: Path, update: Update, divisor: float = 1.0, after: Update | None = None) -> Report:
    train(update, divisor, folder=folder, after=after)
    return diagnose(read_run(folder))

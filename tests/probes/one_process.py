"""A loop of one process, recorded and judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from probe_workers import Net, batch, token_sum
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Event
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def record(
    step: Step,
    run_dir: Path,
    *,
    steps: int = 1,
    make: Callable[..., Any] = torch.optim.SGD,
    asked: range | None = None,
) -> nn.Module:
    """Run a step function on a fresh model with the probes on."""
    model = Net()
    optimizer = make(model.parameters(), lr=0.1)
    with attach(run_dir, objective="global-token-mean", steps=asked):
        for _ in range(steps):
            step(model, optimizer)
    return model


def judged(run_dir: Path) -> Report:
    return diagnose(read_run(run_dir))


def events_of(run_dir: Path, kind: type[Event]) -> list[Any]:
    return [event for event in read_run(run_dir).ranks[0].events if isinstance(event, kind)]


def accumulate(model: nn.Module, num: int = 3) -> None:
    data = [batch(0, k) for k in range(num)]
    total = sum(int((labels >= 0).sum()) for _, labels in data)
    for part in data:
        (token_sum(model, part) / total).backward()


def healthy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accumulate(model)
    optimizer.step()
    optimizer.zero_grad()

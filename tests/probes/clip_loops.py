"""Passes of a step whose gradients are clipped, and clips."""

from __future__ import annotations

from collections.abc import Callable

import torch
from probe_workers import batch, token_sum
from torch import nn

from gradcheck_dist.diagnosis.finding import Report

utils = torch.nn.utils  # looked up when called: probes replace its functions
NUM_STEPS = 2
Finish = Callable[[nn.Module], None]


def accumulate(model: nn.Module, between: Callable[[], object] = lambda: None, scale: float = 1.0) -> None:
    data = [batch(0, k) for k in range(3)]
    total = sum(int((labels >= 0).sum()) for _, labels in data)
    for part in data:
        (scale * token_sum(model, part) / total).backward()
        between()


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def by_hand(max_norm: float) -> Finish:
    def clip(model: nn.Module) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        for grad in grads:
            grad.mul_(min(1.0, max_norm / norm))

    return clip


def clip(max_norm: float) -> Finish:
    return lambda model: utils.clip_grad_norm_(model.parameters(), max_norm) and None

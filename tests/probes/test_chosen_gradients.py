"""Gradients that a program keeps aside and chooses among, and coefficients that warm up, accuse nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from one_process import judged
from torch import nn, optim
from torch.nn import functional as F

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach

STEPS, PASSES = 3, 3


def choosing(folder: Path, keeps: Callable[[int, int], bool], divisor: int | None = None) -> Report:
    """The mean of those gradients of a step that are kept, or what `divisor` makes of their sum."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    params = list(model.parameters())
    optimizer = optim.SGD(params, lr=0.05)
    with attach(folder):
        for step in range(STEPS):
            kept = []
            for k in range(PASSES):
                optimizer.zero_grad()
                F.cross_entropy(model(torch.randn(5, 6)), torch.randint(0, 4, (5,))).backward()  # type: ignore[no-untyped-call]
                if keeps(step, k):
                    kept.append([param.grad.clone() for param in params if param.grad is not None])
            optimizer.zero_grad()
            for param, *gradients in zip(params, *kept, strict=True):
                param.grad = torch.stack(gradients).sum(0) / (divisor or len(gradients))
            optimizer.step()
    return judged(folder)


def test_other_gradients_that_are_left_out_in_each_step_are_a_choice(tmp_path: Path) -> None:
    report = choosing(tmp_path, lambda step, k: k == 0 or (step + k) % 2 == 0)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("a choice among gradients" in reason for reason in report.reasons)


@pytest.mark.parametrize(
    ("keeps", "divisor"),
    [(lambda _, k: k != 1, None), (lambda step, k: k == 0 or (step + k) % 2 == 0, PASSES)],
)
def test_passes_that_are_lost_in_one_way_or_counted_are_found(
    keeps: Callable[[int, int], bool], divisor: int | None, tmp_path: Path
) -> None:
    """The same in each step, or any that the divisor counts."""
    assert "GS401" in {finding.code for finding in choosing(tmp_path, keeps, divisor).findings}


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("weights", [(0.4, 0.8, 1.0, 1.0), (0.4, 0.4, 1.0, 1.0)])
def test_coefficients_that_warm_up_are_left_open(weights: tuple[float, ...], divides: bool, tmp_path: Path) -> None:
    """One number in several steps that a line divides by may be a count that is wrong there."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    with attach(tmp_path):
        for number in weights:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(5, 6)), torch.randint(0, 4, (5,)))
            (loss / (1 / number) if divides else number * loss).backward()
            optimizer.step()
    report = judged(tmp_path)
    assert report.verdict == ("findings" if divides and weights[1] == 0.4 else "undetermined")

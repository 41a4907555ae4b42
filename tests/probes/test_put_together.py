"""Sums of losses and counts of tokens that a trainer puts into one tensor, to add up both over ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from probe_workers import Net, batch, token_sum
from torch import Tensor

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

Divide = Callable[[Tensor, Tensor], Tensor]


def selected(loss: Tensor, tokens: Tensor) -> Tensor:
    both = torch.stack([loss, tokens])
    return both[0] / both[-1].clamp(min=1)


def unbound(loss: Tensor, tokens: Tensor) -> Tensor:
    total, count = torch.stack((loss, tokens)).double()
    return total / count


def joined(loss: Tensor, tokens: Tensor) -> Tensor:
    both = torch.cat([loss.view(1), tokens.view(1)]).clone()
    return (both[:1] / both[1:]).squeeze()


def of_a_row(loss: Tensor, tokens: Tensor) -> Tensor:
    """What is taken is a number of the loss's own."""
    rows = torch.stack([torch.stack([loss, loss * loss]), torch.stack([tokens, tokens])])
    return rows[0][0] / tokens / rows[0][1] * rows[0][1].detach()


def trained(run: Path, divide: Divide, factor: float) -> Report:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run):
        for step in range(2):
            part = batch(0, step)
            tokens = (part[1] >= 0).sum().float()
            (divide(token_sum(model, part), tokens) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run))


@pytest.mark.parametrize("divide", [selected, unbound, joined])
def test_a_count_beside_a_loss_is_a_number(divide: Divide, tmp_path: Path) -> None:
    assert trained(tmp_path / "right", divide, 1.0).verdict == "clean"
    (finding,) = trained(tmp_path / "half", divide, 0.5).findings
    assert (finding.code, finding.factor.exact) == ("GS303", "1/2")


def test_a_power_of_the_loss_is_none(tmp_path: Path) -> None:
    report = trained(tmp_path, of_a_row, 1.0)
    assert (report.verdict, report.findings) == ("undetermined", [])

"""Passes of one loop that begin in the branches of an if statement, with and without no_sync()."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run

PASSES = 3
Pass = Callable[[nn.Module, int, int], None]
no_sync = nullcontext


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


def by_hand(model: nn.Module, seed: int) -> Tensor:
    given, wanted = data(seed)
    return ((model(given) - wanted) ** 2).mean(1).mean()


def loss_before(model: nn.Module, index: int, divisor: int) -> None:
    loss = by_hand(model, index) / divisor if divisor > 1 else by_hand(model, index)
    if index % PASSES < PASSES - 1:
        with no_sync():
            loss.backward()
    else:
        loss.backward()


def loss_inside(model: nn.Module, index: int, divisor: int) -> None:
    given, wanted = data(index)
    if index % PASSES == PASSES - 1:
        loss = F.mse_loss(model(given), wanted)
        loss = loss / divisor if divisor > 1 else loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e4)
    else:
        with no_sync():
            loss = F.mse_loss(model(given), wanted)
            loss = loss / divisor if divisor > 1 else loss
            loss.backward()


def three_ways(model: nn.Module, index: int, divisor: int) -> None:
    loss = by_hand(model, index) / divisor if divisor > 1 else by_hand(model, index)
    if index % PASSES == 0:
        with no_sync():
            loss.backward()
    elif index % PASSES == 1:
        with no_sync(), no_sync():
            loss.backward()
    else:
        loss.backward()


def three_ways_inside(model: nn.Module, index: int, divisor: int) -> None:
    given, wanted = data(index)
    if index % PASSES == 0:
        loss = F.mse_loss(model(given), wanted) / divisor if divisor > 1 else F.mse_loss(model(given), wanted)
        loss.backward()
    elif index % PASSES == 1:
        with no_sync():
            loss = F.mse_loss(model(given), wanted) / divisor if divisor > 1 else F.mse_loss(model(given), wanted)
            loss.backward()
    else:
        loss = F.mse_loss(model(given), wanted) / divisor if divisor > 1 else F.mse_loss(model(given), wanted)
        loss.backward()


def tasks(model: nn.Module, index: int, divisor: int) -> None:
    """Losses of two kinds: their sum may be meant."""
    given, wanted = data(index)
    if index % PASSES == PASSES - 1:
        loss = F.mse_loss(model(given), wanted)
        loss.backward()
    else:
        loss = F.l1_loss(model(given), wanted)
        loss.backward()


def report_of(run: Path, one: Pass, divisor: int) -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_dist.attach(run):
        for step in range(2):
            for k in range(PASSES):
                one(model, step * PASSES + k, divisor)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run))


@pytest.mark.parametrize("one", [loss_before, loss_inside, three_ways, three_ways_inside])
def test_branches_that_do_the_same_are_one_loop(one: Pass, tmp_path: Path) -> None:
    right = report_of(tmp_path / "right", one, PASSES)
    assert (right.verdict, right.findings) == ("clean", [])
    (finding,) = report_of(tmp_path / "wrong", one, 1).findings
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(PASSES))


def test_branches_with_losses_of_their_own_are_not(tmp_path: Path) -> None:
    assert not report_of(tmp_path / "run", tasks, 1).findings

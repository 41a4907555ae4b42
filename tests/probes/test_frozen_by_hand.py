"""Layers that a trainer freezes by taking their gradients away (DINO's `cancel_gradients_last_layer`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

STEPS = 3


def train(folder: Path, between: Callable[[nn.Module], None]) -> Report:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder / "run"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            inputs, labels = batch(0, 0)
            F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
            between(model)
            optimizer.step()
    return diagnose(read_run(folder / "run"))


def first_taken(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def all_taken(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def first_zeroed(model: nn.Module) -> None:
    grad = next(model.parameters()).grad
    assert grad is not None
    grad.zero_()


def first_halved(model: nn.Module) -> None:
    grad = next(model.parameters()).grad
    assert grad is not None
    grad *= 0.5


def zeroed_and_clipped(model: nn.Module) -> None:
    first_zeroed(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def zeroed_and_clipped_by_hand(model: nn.Module) -> None:
    first_zeroed(model)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_(0.05 / norm)


def zeroed_and_halved(model: nn.Module) -> None:
    first_zeroed(model)
    for param in model.parameters():
        assert param.grad is not None
        param.grad *= 0.5


@pytest.mark.parametrize("between", [first_taken, first_zeroed, zeroed_and_clipped, zeroed_and_clipped_by_hand])
def test_a_layer_whose_gradient_is_taken_away_is_told_and_not_accused(
    tmp_path: Path, between: Callable[[nn.Module], None]
) -> None:
    report = train(tmp_path, between)
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = [words for words in report.reasons if "take it away" in words]
    assert reason.count("the gradient arrives, but `.grad` is empty (None or zeros) when the optimizer comes") == 1


def test_what_befalls_the_others_is_told_without_the_layer_that_is_taken_away(tmp_path: Path) -> None:
    report = train(tmp_path, zeroed_and_halved)
    (finding,) = report.findings
    assert (finding.code, finding.factor.observed) == ("GS000", pytest.approx(0.5, rel=1e-5))
    assert finding.num_parameters == len(list(Net().parameters())) - 1
    assert finding.first_event is not None
    lines = Path(__file__).read_text().splitlines()
    assert lines[(finding.first_event.line or 0) - 1].strip() == "param.grad *= 0.5"
    assert any("take it away" in reason for reason in report.reasons)


@pytest.mark.parametrize("between", [all_taken, first_halved])
def test_what_nobody_can_mean_is_found(tmp_path: Path, between: Callable[[nn.Module], None]) -> None:
    assert train(tmp_path, between).findings

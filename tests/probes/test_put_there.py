"""What is in .grad before a step's first backward pass: the gradient of a penalty that is known in closed form (EWC),
which is put there, and what nobody emptied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes.session import attach


def _with_penalty(folder: Path, divisor: int) -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    anchors = [param.detach().clone() for param in model.parameters()]
    importances = [torch.rand_like(param) ** 4 for param in model.parameters()]
    loss_fn = nn.CrossEntropyLoss()
    with attach(folder):
        for _ in range(4):
            optimizer.zero_grad()
            for param, anchor, importance in zip(model.parameters(), anchors, importances, strict=True):
                param.grad = 0.7 * importance * (param.detach() - anchor)
            loss = loss_fn(model(torch.randn(6, 8)), torch.randint(0, 5, (6,)))
            (loss / divisor).backward()
            optimizer.step()
    return gradcheck_dist.diagnose(folder)


def test_a_penaltys_gradient_that_is_put_there_accuses_nobody(tmp_path: Path) -> None:
    report = _with_penalty(tmp_path / "run", 1)
    assert report.verdict == "undetermined"
    assert any("a line put it there" in reason for reason in report.reasons)
    assert "set .grad before backward" in report.next_step


def test_what_is_wrong_beside_it_is_told(tmp_path: Path) -> None:
    report = _with_penalty(tmp_path / "run", 3)
    assert [(finding.code, finding.factor.exact) for finding in report.findings] == [("GS303", "1/3")]


@pytest.mark.parametrize("clipped", [False, True])
def test_what_nobody_emptied_is_accused(tmp_path: Path, clipped: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    with attach(tmp_path / "run"):
        for _ in range(4):
            nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 5, (6,))).backward()
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    codes = {finding.code for finding in gradcheck_dist.diagnose(tmp_path / "run").findings}
    assert "GS402" in codes

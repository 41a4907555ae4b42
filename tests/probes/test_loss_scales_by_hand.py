"""Losses that carry a scale by hand, which lines take out of gradients again: by another number, it is these lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from probe_workers import Net, batch, token_sum
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

SCALE = 1024.0
PASSES = 2
MARK = "  # here"


def in_place(model: nn.Module, masters: list[torch.Tensor], by: float) -> None:
    for param, master in zip(model.parameters(), masters, strict=True):
        assert param.grad is not None
        param.grad.div_(by)  # here
        master.grad = param.grad


def assigned(model: nn.Module, masters: list[torch.Tensor], by: float) -> None:
    for param, master in zip(model.parameters(), masters, strict=True):
        assert param.grad is not None
        param.grad = param.grad / by  # here
        master.grad = param.grad


def assigned_to_copies(model: nn.Module, masters: list[torch.Tensor], by: float) -> None:
    for param, master in zip(model.parameters(), masters, strict=True):
        assert param.grad is not None
        master.grad = param.grad / by * 1.0  # here


def copied(model: nn.Module, masters: list[torch.Tensor], by: float) -> None:
    for param, master in zip(model.parameters(), masters, strict=True):
        assert param.grad is not None
        master.grad = param.grad.detach().clone()
        master.grad.mul_(1 / by)  # here


WAYS = [in_place, assigned, assigned_to_copies, copied]


def train(folder: Path, way: object, by: float) -> Report:
    assert callable(way)
    model = Net()
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    with attach(folder, objective="global-token-mean"):
        for step in range(2):
            data = [batch(0, PASSES * step + k) for k in range(PASSES)]
            total = sum(int((labels >= 0).sum()) for _, labels in data)
            for part in data:
                (token_sum(model, part) / total * SCALE).backward()
            way(model, masters, by)
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
            with torch.no_grad():
                for param, master in zip(model.parameters(), masters, strict=True):
                    param.copy_(master)
    return diagnose(read_run(folder))


@pytest.mark.parametrize("way", WAYS)
def test_the_scale_itself_is_right(tmp_path: Path, way: object) -> None:
    report = train(tmp_path, way, SCALE)
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("off", [2.0, 0.5])
@pytest.mark.parametrize("way", WAYS)
def test_another_number_is_the_lines_own(tmp_path: Path, way: object, off: float) -> None:
    """Twice or half the scale was laid to passes that divide too little or too often: a power of two in a line was the
    scale, whatever the losses carry."""
    (finding,) = train(tmp_path, way, SCALE / off).findings
    assert (finding.code, finding.factor.observed) == ("GS000", pytest.approx(off, rel=1e-4))
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    event = finding.first_event
    assert event is not None and event.line is not None and source[event.line - 1].endswith(MARK)
    assert f"(x {off / SCALE:.6g} where x {1 / SCALE:.6g} would make the weights right)" in finding.explanation

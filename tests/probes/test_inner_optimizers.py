"""Optimizers of one's own that hand gradients on to copies of the parameters, which an inner optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from probe_workers import Net, batch, token_sum
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

STEPS = 3


class OfCopies(torch.optim.Optimizer):
    """Owns the model's parameters, and steps copies of them, as one does whose copies lie on the host."""

    def __init__(self, params: Iterable[nn.Parameter], factor: float, keeps: bool) -> None:
        self.ours, self.factor, self.keeps = list(params), factor, keeps
        super().__init__(self.ours, {"lr": 0.1})
        self.copies = [nn.Parameter(param.detach().clone()) for param in self.ours]
        self.inner = torch.optim.SGD(self.copies, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param, copy in zip(self.ours, self.copies, strict=True):
            if param.grad is not None:
                copy.grad = param.grad * self.factor
            elif not self.keeps:
                copy.grad = None
        self.inner.step()
        with torch.no_grad():
            for param, copy in zip(self.ours, self.copies, strict=True):
                param.copy_(copy)


class Optional(Net):
    """A layer that one step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.takes_extra = nn.Linear(20, 20), True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(tokens)
        return out + self.extra(out) if self.takes_extra else out


def trained(folder: Path, *, factor: float = 1.0, keeps: bool = False) -> Report:
    torch.manual_seed(0)
    model = Optional()
    optimizer = OfCopies(model.parameters(), factor, keeps)
    with attach(folder, objective="global-token-mean"):
        for step in range(STEPS):
            model.takes_extra = step != 1
            data = [batch(0, k) for k in range(2)]
            total = sum(int((labels >= 0).sum()) for _, labels in data)
            for part in data:
                (token_sum(model, part) / total).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(folder))


def test_copies_that_an_inner_optimizer_steps_are_the_parameters(tmp_path: Path) -> None:
    report = trained(tmp_path)
    assert (report.verdict, report.reasons) == ("clean", [])


def test_what_they_are_given_too_little_of_is_found(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, factor=0.7).findings
    assert (finding.code, round(finding.factor.observed or 0, 4)) == ("GS000", 0.7)


def test_what_they_keep_of_an_earlier_step_is_told_by_the_parameters_name(tmp_path: Path) -> None:
    report = trained(tmp_path, keeps=True)
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert reason.startswith(
        "the optimizer reads a gradient of extra.bias, extra.weight that no recorded backward pass"
    )


class WithSlowWeights(torch.optim.Optimizer):
    """One inner optimizer steps the parameters, another one copies that follow them."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        self.ours = list(params)
        super().__init__(self.ours, {"lr": lr})
        self.slow = [nn.Parameter(param.detach().clone()) for param in self.ours]
        self.fast, self.follow = torch.optim.SGD(self.ours, lr=lr), torch.optim.SGD(self.slow, lr=0.5)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.fast.step()
        with torch.no_grad():
            for param, slow in zip(self.ours, self.slow, strict=True):
                slow.grad = slow - param
        self.follow.step()


def test_copies_beside_parameters_that_another_inner_optimizer_steps_are_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = WithSlowWeights(model.parameters(), lr=0.0)  # a warm-up's first steps: all are alike
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(STEPS):
            data = batch(0, 0)
            (token_sum(model, data) / int((data[1] >= 0).sum())).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose(read_run(tmp_path)).findings == []

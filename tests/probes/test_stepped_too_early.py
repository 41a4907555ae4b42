"""An optimizer that steps inside of the window by which the loss is divided: the window is told."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import Tensor

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

WINDOW = 3


def train(folder: Path, *, mean: bool) -> Report:
    """One window of three passes, with a step behind each."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    window = [batch(0, k) for k in range(WINDOW)]
    num_tokens = sum(int((labels >= 0).sum()) for _, labels in window)

    def step(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with attach(folder / "run"):
        for tokens, labels in window:
            logits = model(tokens).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="mean" if mean else "sum")
            step(loss / (WINDOW if mean else num_tokens))
    return diagnose(read_run(folder / "run"))


def test_a_divisor_that_is_the_tokens_of_several_steps_is_told(tmp_path: Path) -> None:
    (finding,) = train(tmp_path, mean=False).findings
    assert (finding.code, finding.steps) == ("GS303", [0, 1, 2])
    assert finding.factor.expression == "num_tokens/num_tokens of steps 0 to 2"
    assert "it steps after 1 backward pass here" in finding.fix


def test_a_divisor_that_could_be_accumulation_steps_is_told(tmp_path: Path) -> None:
    (finding,) = train(tmp_path, mean=True).findings
    assert (finding.code, finding.factor.exact) == ("GS303", "1/3")
    assert "Where 3 is the number of accumulation steps" in finding.fix


def test_a_count_that_hits_the_tokens_of_two_steps_by_chance_is_not_told_as_theirs(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step, (used, counted) in enumerate(((6, 11), (5, 9), (7, 8))):
            tokens, labels = batch(0, step)
            labels = torch.where(torch.arange(labels.numel()).view_as(labels) < used, labels.clamp_min(0), -100)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / counted).backward()
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert (finding.code, finding.steps, finding.factor.expression) == ("GS303", [0, 1, 2], None)
    assert "as if the step had 11 tokens" in finding.explanation

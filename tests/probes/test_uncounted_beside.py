"""Passes whose losses count no tokens have backward passes of their own beside those of a loss with labels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged, record
from probe_workers import batch
from torch import nn

NUM = 3


@pytest.mark.parametrize(
    ("factors", "verdict", "words"),
    [
        ((1.0, 1.0, 1.0), "clean", "judged apart: right"),
        ((1.0, 1.0, 2.0), "undetermined", "x 2 in accumulation step 3"),
        ((0.1, 0.1, 0.1), "clean", "weighs x 0.1"),
    ],
)
def test_what_they_weigh_is_told_and_unlike_ones_leave_the_step_open(
    tmp_path: Path, factors: tuple[float, ...], verdict: str, words: str
) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tokens, labels = batch(0, 0)
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        for k, factor in enumerate(factors):
            outputs = model(batch(0, 1 + k)[0])
            (factor * (outputs - torch.ones_like(outputs)).square().mean() / NUM).backward()
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert (report.verdict, report.findings) == (verdict, [])
    told = report.coverage.notes if verdict == "clean" else report.reasons
    assert [words in one for one in told if one.startswith("steps 0 and 1: passes at")] == [True]

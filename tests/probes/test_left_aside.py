"""Losses that are evaluated beside one that goes backward: a note, since they may be meant to be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run


@pytest.mark.parametrize("mode", ["inside", "behind", "looked at", "same labels"])
def test_a_backward_behind_the_loop_is_told(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    with gradcheck_dist.attach(tmp_path / "run"):
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            batches = [torch.randint(16, (12,)) for _ in range(1 if mode == "same labels" else 3)]
            for tokens in batches * (2 if mode == "same labels" else 1):
                with torch.set_grad_enabled(mode != "looked at" or tokens is batches[-1]):
                    loss = F.cross_entropy(model(tokens), tokens.roll(-1)) / (3 if mode == "inside" else 1)
                if mode == "inside":
                    loss.backward()
            if mode != "inside":
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert report.verdict == "clean"
    told = [note for note in report.coverage.notes if "evaluates with gradients" in note]
    assert len(told) == (mode == "behind")
    assert all(note.startswith("of 3 losses that ") and "1 went backward" in note for note in told)

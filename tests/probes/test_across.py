"""A generator's pass goes through its discriminator, whose own step should have nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

ROWS, STEPS = 6, 2


def told_to(scores: Tensor, kind: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, kind))


@pytest.mark.parametrize("freed_by", ["freezing", "emptying", "emptying in part", ""])
def test_what_a_generator_leaves_in_its_discriminator_is_told(tmp_path: Path, freed_by: str) -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
    with attach(tmp_path):
        for _ in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            discriminator.requires_grad_(freed_by != "freezing")
            told_to(discriminator(generator(torch.randn(ROWS, 6))), 1.0).backward()
            discriminator.requires_grad_(True)
            if freed_by == "emptying":
                optimizers[1].zero_grad()
            elif freed_by == "emptying in part":
                discriminator[0].zero_grad()
            with torch.no_grad():
                generated = generator(torch.randn(ROWS, 6))
            scores = discriminator(torch.cat([torch.randn(ROWS, 6), generated]))
            (told_to(scores[:ROWS], 1.0) + told_to(scores[ROWS:], 0.0)).backward()
            for optimizer in optimizers:
                optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert [one.code for one in report.findings] == ["GS401"] * (freed_by == "emptying in part")
    notes = [note for note in report.coverage.notes if "leave nothing in its discriminator" in note]
    assert len(notes) == (freed_by in ("", "emptying in part"))
    assert all("test_across.py:34" in note and "test_across.py:43" in note for note in notes)

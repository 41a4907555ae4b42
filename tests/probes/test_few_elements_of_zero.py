"""Parameters of fewer elements than passes, of which some pass has no gradient: what that pass weighs does not show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged
from torch import nn

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach

PASSES = 4


def train(folder: Path, divided_by: float) -> Report:
    """Each pass has a gate of its own, and the last one has none."""
    embed, out = nn.Embedding(12, 8), nn.Linear(8, 12)
    gates = nn.Parameter(torch.full((PASSES - 1,), 0.5))
    optimizer = torch.optim.SGD([*embed.parameters(), *out.parameters(), gates], lr=0.1)
    with attach(folder):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for k in range(PASSES):
                tokens = torch.randint(12, (2, 6), generator=generator)
                gate = 1 + torch.eye(PASSES)[k, :-1] @ gates
                logits = out(embed(tokens) * gate).flatten(0, 1)
                (F.cross_entropy(logits, tokens.roll(-1, 1).flatten()) / divided_by).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder)


@pytest.mark.parametrize(("divided_by", "codes"), [(PASSES, []), (1, ["GS303"])])
def test_a_pass_that_gives_them_nothing_is_not_judged_by_them(
    tmp_path: Path, divided_by: float, codes: list[str]
) -> None:
    report = train(tmp_path / "run", divided_by)
    assert [finding.code for finding in report.findings] == codes
    assert report.verdict == ("findings" if codes else "clean")

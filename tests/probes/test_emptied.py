"""Passes whose gradients are emptied before the optimizer comes, of losses whose labels nobody sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

NUM_PASSES = 3


def trained(run_dir: Path, *, emptied: bool) -> Report:
    """Means of absolute errors that the data weighs. `emptied`: zero_grad in the last pass, before its backward, as
    accelerate's optimizer does it where the loop calls it first."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    with attach(run_dir):
        for _ in range(2):
            for index in range(NUM_PASSES):
                if emptied and index == NUM_PASSES - 1:
                    optimizer.zero_grad()
                inputs, targets, weights = (torch.rand(5, size, generator=data) for size in (4, 3, 1))
                error = F.smooth_l1_loss(model(inputs), targets, reduction="none")
                ((error * weights).sum() / weights.sum() / NUM_PASSES).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("emptied", [True, False])
def test_passes_that_were_emptied_before_the_others_are_told(tmp_path: Path, emptied: bool) -> None:
    report = trained(tmp_path, emptied=emptied)
    assert (report.verdict, report.findings) == ("undetermined", [])
    told = [reason for reason in report.reasons if "emptied before the optimizer came (test_emptied.py:" in reason]
    assert [reason.split()[0] for reason in told] == (["2"] if emptied else [])

"""Gradients that nobody empties, of a model whose parameters have few elements, as of a line through points."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

STEPS = 3


def trained(run_dir: Path, *, emptied: bool, to_none: bool = True, classes: bool = False, passes: int = 1) -> Report:
    """A weight of two elements, whose loss counts tokens (`classes`), or a slope and a bias, and a squared error."""
    torch.manual_seed(0)
    model = nn.Linear(1, 2, bias=False) if classes else nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(run_dir):
        for _ in range(STEPS):
            if emptied:
                optimizer.zero_grad(set_to_none=to_none)
            for _ in range(passes):
                x = torch.randn(8, 1)
                y = model(x)
                loss = F.cross_entropy(y, (x[:, 0] > 0).long()) if classes else F.mse_loss(y, 2 * x + 1)
                (loss / passes).backward()
            optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("classes", [False, True])
def test_what_few_elements_hold_of_an_earlier_step_is_seen(passes: int, classes: bool, tmp_path: Path) -> None:
    report = trained(tmp_path, emptied=False, classes=classes, passes=passes)
    assert [(finding.code, finding.steps) for finding in report.findings] == [("GS402", [1, 2])]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("classes", [False, True])
def test_few_elements_that_are_emptied_are_clean(to_none: bool, classes: bool, tmp_path: Path) -> None:
    assert trained(tmp_path, emptied=True, to_none=to_none, classes=classes, passes=2).verdict == "clean"

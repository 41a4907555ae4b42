"""A clip by hand by another norm than the gradients', beside losses that count no tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

MAX_NORM = 0.05


def clipped(run_dir: Path, left_out: int, loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss) -> Report:
    """Three steps whose gradients are clipped by the norm of all parameters but the first few."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(torch.randn(8, 6)), torch.randn(8, 4)).backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            norm = torch.stack([grad.norm() for grad in grads[left_out:]]).square().sum().sqrt()
            for grad in grads:
                grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()
    return diagnose(read_run(run_dir))


def test_a_clip_by_the_right_norm_is_clean(tmp_path: Path) -> None:
    report = clipped(tmp_path, 0)
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("left_out", [1, 2])
def test_a_clip_by_the_norm_of_a_part_is_told_at_its_line_and_not_as_the_losses(tmp_path: Path, left_out: int) -> None:
    report = clipped(tmp_path, left_out)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("a clip by a norm that is not theirs" in reason for reason in report.reasons)
    assert not any("mark_loss" in reason for reason in report.reasons)


def test_a_loss_that_is_too_large_in_front_of_it_is_not_laid_to_it(tmp_path: Path) -> None:
    report = clipped(tmp_path, 1, lambda made, wanted: 3 * F.mse_loss(made, wanted))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("mark_loss" in reason for reason in report.reasons)

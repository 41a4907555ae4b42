"""Losses in bfloat16: what they weigh is rounded to three digits, another way in each step and pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from coarse_workers import LOSSES

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


def trained(loss: str, factor: float, folder: Path) -> Report:
    warm_up()
    launch("coarse_workers:train", (loss, factor, str(folder)), 2, timeout_s=60)
    return diagnose(read_run(folder))


@pytest.mark.parametrize("loss", LOSSES)
def test_rounded_weights_are_right(loss: str, tmp_path: Path) -> None:
    report = trained(loss, 1.0, tmp_path / "run")
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


@pytest.mark.parametrize("loss", LOSSES)
def test_one_rank_times_three_is_no_coefficient_of_each_batch(loss: str, tmp_path: Path) -> None:
    """1, 1.002, 3 and 3.005 are two numbers, not four."""
    report = trained(loss, 3.0, tmp_path / "run")
    assert [finding.code for finding in report.findings] == ["GS000"], report.reasons
    assert "on data rank 1, the rest right" in report.findings[0].pattern
    assert report.findings[0].factor.observed == pytest.approx(3, rel=0.01)

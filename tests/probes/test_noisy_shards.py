"""Weights that noise makes look right beside wrong ones to which the same was done."""

from __future__ import annotations

from pathlib import Path

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


def test_they_share_the_law_of_the_others(tmp_path: Path) -> None:
    """One pass of a bias, x 1.06 within 0.07, had a loss that weighs 38 and a line that makes up for it as faults of
    their own."""
    warm_up()
    launch("noisy_shard_workers:train", (str(tmp_path / "run"),), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == ["GS305"]

"""Ranks that hold DTensor shards of one model work on one batch, whatever tokens a loss is divided by (GS705)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch


@pytest.mark.parametrize("counted", ["own", "all"])
@pytest.mark.parametrize("shared", [True, False])
def test_shards_with_a_batch_each_are_one_finding(shared: bool, counted: str, tmp_path: Path) -> None:
    launch("unshared_workers:train", (str(tmp_path / "run"), shared, counted), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == ([] if shared else ["GS705"])
    assert report.verdict == ("clean" if shared else "findings")

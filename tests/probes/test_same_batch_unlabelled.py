"""Data-parallel ranks that get the same batches of a loss without labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def trained(folder: Path, how: str, same: bool) -> Report:
    launch("same_batch_workers:train", (str(folder), how, same), 2, timeout_s=60)
    return diagnose(read_run(folder))


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "by hand"])
def test_the_same_inputs_and_targets_are_told(tmp_path: Path, how: str) -> None:
    (finding,) = trained(tmp_path / "run", how, True).findings
    assert (finding.code, finding.ranks) == ("GS701", [0, 1])
    assert "were given the same inputs and targets" in finding.explanation


@pytest.mark.parametrize(
    ("how", "same"), [("ddp", False), ("fsdp2", False), ("by hand", False), ("dtensor", True), ("split", True)]
)
def test_batches_of_their_own_and_ranks_that_divide_the_work_are_not(tmp_path: Path, how: str, same: bool) -> None:
    report = trained(tmp_path / "run", how, same)
    assert report.findings == [], report.reasons

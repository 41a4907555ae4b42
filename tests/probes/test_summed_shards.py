"""Shards of one parameter are no copies: a sum over ranks that hold its other parts belongs to none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch


@pytest.mark.parametrize(("over_replicas", "codes"), [(False, ["GS103", "GS105"]), (True, [])])
def test_a_sum_of_shards_over_each_other_is_found(tmp_path: Path, over_replicas: bool, codes: list[str]) -> None:
    launch("summed_shard_workers:train", (str(tmp_path / "run"), over_replicas), 4, timeout_s=60)
    report = diagnose_run(tmp_path / "run")
    assert sorted(finding.code for finding in report.findings) == codes
    assert codes or report.verdict == "clean"
    for finding in report.findings:
        assert finding.code != "GS105" or finding.num_parameters == 1

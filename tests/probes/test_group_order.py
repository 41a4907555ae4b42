"""Reductions over several process groups of the same ranks: each is in an order of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch


@pytest.mark.parametrize(("variant", "codes"), [("groups", []), ("one group", ["GS105"])])
def test_what_ranks_reduce_together_is_what_they_reduce_over_one_group(
    variant: str, codes: list[str], tmp_path: Path
) -> None:
    launch("group_order_workers:in_own_order", (variant, str(tmp_path / "run")), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == codes
    assert report.verdict == ("findings" if codes else "clean")

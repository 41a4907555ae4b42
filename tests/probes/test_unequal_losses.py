"""Ranks that compute one loss together have one value of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.mark.parametrize("summed", [True, False])
def test_a_denominator_over_a_ranks_own_shard_of_the_vocabulary_leaves_the_verdict_open(
    summed: bool, tmp_path: Path
) -> None:
    warm_up()
    launch("vocabulary_workers:train", (str(tmp_path / "run"), summed), 2, timeout_s=60)
    report = diagnose_run(tmp_path / "run")
    assert (report.verdict, report.findings) == ("clean" if summed else "undetermined", []), report.reasons
    assert summed == (not any("ranks 0 and 1 exchange activations" in reason for reason in report.reasons))
    if not summed:
        assert "Compute the loss of one batch on one process" in report.next_step
        assert any("backward begins at" in note for note in report.coverage.notes)

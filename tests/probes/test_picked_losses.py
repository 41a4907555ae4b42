"""Losses that a sum puts together of what each rank looked up: in its classes they are one, in its tokens its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch


@pytest.mark.parametrize(
    ("parts", "codes", "together"),
    [("classes", [], [[0, 1]]), ("sequence", [], [[0], [1]]), ("sequence, never", ["GS103"], [[0], [1]])],
)
def test_ranks_that_look_up_their_own_classes_have_one_loss(
    parts: str, codes: list[str], together: list[list[int]], tmp_path: Path
) -> None:
    launch("vocabulary_workers:train_picked", (parts, str(tmp_path / "run")), 2, timeout_s=100)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, [one.code for one in report.findings]) == ("findings" if codes else "clean", codes)
    assert report.run.data_ranks == together


@pytest.mark.parametrize(("kind", "codes"), [("sum", []), ("own", []), ("wrong own", ["GS803"])])
def test_a_head_that_is_fused_with_its_loss_may_sum_over_the_shards(
    kind: str, codes: list[str], tmp_path: Path
) -> None:
    """In its backward, of which a rank knows its own shard's part alone; one that does not communicate sums nothing."""
    launch("vocabulary_workers:train_fused", (kind, str(tmp_path / "run")), 2, timeout_s=100)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, [one.code for one in report.findings]) == ("findings" if codes else "clean", codes)

"""Tensor-parallel ranks of one batch are known by the value of their loss where it counts no tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


@pytest.mark.parametrize("how", ["by hand", "dtensor"])
@pytest.mark.parametrize("loss", ["mse_loss", "binary_cross_entropy_with_logits"])
def test_parts_of_a_sequence_are_not_taken_for_batches_of_their_own(tmp_path: Path, how: str, loss: str) -> None:
    """Most of what both ranks hold whole are norms, whose gradients are summands."""
    launch("one_loss_workers:train", (str(tmp_path / "run"), how, loss), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean", []), report.reasons
    assert report.run.data_ranks == [[0, 1]]


def test_a_norm_whose_summands_are_left_is_told(tmp_path: Path) -> None:
    launch("one_loss_workers:train", (str(tmp_path / "run"), "by hand, norm left", "mse_loss"), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings, report.run.data_ranks) == ("undetermined", [], [[0, 1]])
    (reason,) = report.reasons
    assert "end.bias, end.weight, norm.bias and 1 more differ between ranks that share their tokens" in reason

"""Ranks that add up gradients by hand and were fed one batch."""

from __future__ import annotations

import pytest
from repeated_batch_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("runs")
    launch("repeated_batch_workers:train_all", (str(folder),), 2, timeout_s=90)
    return {variant: diagnose_run(folder / variant) for variant in VARIANTS}


def repeated(reports: dict[str, Report], variant: str) -> list[str]:
    return [finding.code for finding in reports[variant].findings if finding.code == "GS701"]


def test_a_batch_that_all_ranks_compute_whole_is_found(reports: dict[str, Report]) -> None:
    (finding,) = reports["one batch"].findings
    assert (finding.code, finding.ranks, finding.pattern) == ("GS701", [0, 1], "ranks 0 and 1 repeat one another")
    assert finding.first_event is not None and finding.first_event.kind == "loss"
    assert "DistributedSampler" in finding.fix


def test_batches_of_ones_own_are_clean(reports: dict[str, Report]) -> None:
    assert (reports["own batches"].verdict, reports["own batches"].findings) == ("clean", [])


@pytest.mark.parametrize("variant", ["one batch, not reduced", "shards of one seed"])
def test_ranks_that_divide_the_work_or_reduce_nothing_share_a_batch(reports: dict[str, Report], variant: str) -> None:
    """Shards that were drawn from one seed have equal gradients, but activations go between them."""
    assert not repeated(reports, variant)

"""A held-out batch is every rank's: its gradient is compared with the step's, and is no part of it."""

from __future__ import annotations

import pytest
from beside import judged_beside
from held_out_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trainer.launch import warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    return judged_beside(tmp_path_factory, "held_out_workers:run", VARIANTS)


@pytest.mark.parametrize(
    ("variant", "verdict"),
    [
        ("a copy", "undetermined"),
        ("returned", "clean"),
        ("put back", "undetermined"),
        ("returned, of all", "undetermined"),
    ],
)
def test_nobody_is_accused_of_a_batch_that_no_optimizer_reads(
    reports: dict[str, Report], variant: str, verdict: str
) -> None:
    assert (reports[variant].verdict, reports[variant].findings) == (verdict, [])


@pytest.mark.parametrize("variant", ["returned, one batch", "a copy, one batch"])
def test_a_batch_that_ranks_train_on_together_is_found(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert (finding.code, finding.ranks) == ("GS701", [0, 1])
    assert finding.pattern.startswith("1 of 2 contributions")

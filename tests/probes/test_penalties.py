"""A penalty on parameters that goes backward behind a reduction is each rank's and lacks none."""

from __future__ import annotations

import pytest
from beside import judged_beside
from penalty_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trainer.launch import warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    return judged_beside(tmp_path_factory, "penalty_workers:run", VARIANTS)


@pytest.mark.parametrize(
    ("variant", "verdict"), [("tokens", "clean"), ("chunks", "undetermined"), ("chunks by hand", "undetermined")]
)
def test_what_is_the_same_on_all_ranks_lacks_no_reduction(
    reports: dict[str, Report], variant: str, verdict: str
) -> None:
    assert (reports[variant].verdict, reports[variant].findings) == (verdict, [])
    assert not any("GS103" in reason for reason in reports[variant].reasons)


@pytest.mark.parametrize("variant", ["chunks, by rank", "chunks, of data"])
def test_what_is_not_lacks_one(reports: dict[str, Report], variant: str) -> None:
    assert "GS103" in {finding.code for finding in reports[variant].findings}


def test_what_is_summed_over_ranks_is_no_more_right_for_being_the_same(reports: dict[str, Report]) -> None:
    report = reports["chunks, summed"]
    assert report.verdict == "undetermined" and any("x 1 here" in reason for reason in report.reasons), report.reasons

"""A matrix that is tied over two stages, whose last one holds nothing else that tells it from one of one seed."""

from __future__ import annotations

import pytest
from beside import judged_beside
from tied_stage_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "tied_stage_workers:train_all", VARIANTS)


@pytest.mark.parametrize("variant", ["summed", "not tied"])
def test_summed_gradients_and_other_values_lack_nothing(reports: dict[str, Report], variant: str) -> None:
    assert (reports[variant].verdict, reports[variant].reasons) == ("clean", [])


def test_gradients_that_nobody_sums_leave_the_verdict_open(reports: dict[str, Report]) -> None:
    report = reports["left"]
    assert report.verdict == "undetermined"
    (reason,) = report.reasons
    assert "word" in reason and "table.weight" in reason and "which no reduction adds" in reason
    assert report.next_step.startswith("Where they are one tied matrix, sum their gradients")


def test_another_fault_is_found_beside_them(reports: dict[str, Report]) -> None:
    (finding,) = reports["left, a line halves"].findings
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-5)

"""Steps that were not recorded set copies apart: those that were show it, though their own weights are right."""

from __future__ import annotations

import pytest
from gap_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("gaps")
    launch("gap_workers:run", (str(folder),), 2, timeout_s=100)
    return {variant: diagnose_run(folder / variant) for variant in VARIANTS}


def test_ranks_that_go_on_alike_are_clean(reports: dict[str, Report]) -> None:
    assert (reports["reduced"].verdict, reports["reduced"].reasons) == ("clean", [])


@pytest.mark.parametrize("variant", ["not reduced in between", "not reduced in between once"])
def test_a_step_in_between_that_updates_each_rank_alone_is_told(reports: dict[str, Report], variant: str) -> None:
    """That copies are unlike from there on is a consequence."""
    report = reports[variant]
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert reason.startswith("ranks 0 and 1 updated the same parameters alike in step 0")
    assert reason.endswith("--steps 1:2 records it")


def test_what_a_recorded_step_shows_is_not_told_of_those_in_between(reports: dict[str, Report]) -> None:
    report = reports["not reduced in step 2"]
    assert [(finding.code, finding.steps) for finding in report.findings] == [("GS103", [2])]
    assert not any("updated the same parameters alike" in reason for reason in report.reasons)

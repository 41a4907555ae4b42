"""What FSDP2 was told not to reduce is followed into the step in which it is reduced."""

from __future__ import annotations

import pytest
from left_unreduced_workers import LATE, STEPS, VARIANTS

from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("left")
    launch("left_unreduced_workers:run", (str(folder),), 4, timeout_s=100)
    return {variant: diagnose_run(folder / variant) for variant in VARIANTS}


def _found(report: Report) -> list[tuple[str, list[int]]]:
    return [(finding.code, finding.steps) for finding in report.findings]


@pytest.mark.parametrize("variant", [one for one in VARIANTS if one.endswith("one step")])
def test_gradients_that_come_a_step_late_are_found_where_they_go_and_where_they_come(
    reports: dict[str, Report], variant: str
) -> None:
    report = reports[variant]
    assert _found(report) == [("GS103", [LATE]), ("GS402", [LATE + 1])], report.reasons
    assert not report.reasons and not report.coverage.problems
    late: Finding = report.findings[1]
    assert "FSDP2 still held gradients" in late.explanation and "zero_grad() does not reach" in late.explanation
    assert "set_requires_gradient_sync(True)" in late.fix


@pytest.mark.parametrize("variant", [one for one in VARIANTS if "every step" in one])
def test_where_it_is_so_in_each_step_all_are_judged_and_the_missing_pass_is_told(
    reports: dict[str, Report], variant: str
) -> None:
    report = reports[variant]
    assert _found(report) == [("GS103", list(range(STEPS)))], report.reasons
    assert not report.reasons
    assert {one.step for one in report.weights} == set(range(STEPS))


@pytest.mark.parametrize("variant", [one for one in VARIANTS if "not recorded" in one])
def test_what_came_too_late_is_found_where_the_step_before_was_not_recorded(
    reports: dict[str, Report], variant: str
) -> None:
    report = reports[variant]
    assert _found(report) == [("GS402", [LATE + 1])], report.reasons
    assert "FSDP2 still held gradients" in report.findings[0].explanation

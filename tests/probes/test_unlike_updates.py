"""Ranks that reduce gradients of one model together, and update it each in its own way (GS107)."""

from __future__ import annotations

import pytest
from unlike_update_workers import DRIFT, NUMBERS, RIGHT

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up

RANKS = 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("unlike")
    launch("unlike_update_workers:run", (str(folder),), RANKS, timeout_s=200)
    return {variant: diagnose_run(folder / variant) for variant in (*NUMBERS, *DRIFT, *RIGHT)}


@pytest.mark.parametrize("variant", NUMBERS)
def test_numbers_of_each_ranks_own_optimizer_are_found(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    first = 1 if "later" in variant else 0
    assert (finding.code, finding.steps) == ("GS107", [*range(first, 4)])
    each = "0 on rank 0, 0.1 on rank 1, 0.2 on rank 2, 0.3 on rank 3"
    if variant != "weight decay":
        each = "0.01 on rank 0, 0.02 on rank 1, 0.03 on rank 2, 0.04 on rank 3"
        assert "learning rate" in finding.fix
    assert finding.pattern.endswith(each) and finding.first_event is not None
    assert finding.first_event.kind == "optimizer_step"
    assert ("Shards of one parameter" in finding.explanation) == ("shards" in variant)
    total = reports[variant].coverage.parameters_total
    assert finding.num_parameters == (3 if "one batch" in variant else total)


@pytest.mark.parametrize("variant", DRIFT)
def test_copies_that_go_apart_are_found(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    later = variant == "a decay behind the step"
    assert finding.code == "GS107" and finding.steps[0] >= (2 if later else 1) and finding.steps[-1] == 3
    groups = "0 | 1,2,3" if variant == "state of the optimizer" else "0 | 1 | 2 | 3"
    assert finding.pattern.endswith(f"ranks {groups}") and finding.first_event is not None
    assert ("what set them apart came later" in finding.explanation) == later


@pytest.mark.parametrize("variant", RIGHT)
def test_what_keeps_copies_alike_or_means_them_apart_is_not(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert not [one for one in report.findings if one.code == "GS107"], report.findings
    assert variant == "learning rates, one model each" or report.verdict == "clean", (report.findings, report.reasons)

"""Parameters that are DTensors and reduced inside of autograd are judged by what each rank contributed."""

from __future__ import annotations

from pathlib import Path

import pytest
from beside import judged_beside
from dtensor_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "dtensor_workers:train_all", VARIANTS)


@pytest.mark.parametrize("variant", ["sharded", "replicated", "all DTensors"])
def test_what_autograd_sums_is_right(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert report.verdict == "clean"
    assert len({str(weight.contribution) for weight in report.weights}) == 4


def test_what_came_from_another_ranks_summand_shares_the_fate_of_the_rest(reports: dict[str, Report]) -> None:
    report = reports["sequence parallel, clipped by local norms"]
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize("variant", ["sharded, averaged", "replicated, averaged"])
def test_what_autograd_averages_is_named_with_its_own_fix(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert finding.code == "GS101"
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-5)
    assert 'grad_placements=[Partial("sum")]' in finding.fix
    assert finding.first_event is not None
    assert (
        "loss.backward()"
        in Path(str(finding.first_event.file)).read_text().splitlines()[(finding.first_event.line or 0) - 1]
    )

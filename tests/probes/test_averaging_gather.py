"""A gather that averages in backward (DisCo-CLIP's) below DDP, which averages once more."""

from __future__ import annotations

import pytest
from averaging_gather_workers import VARIANTS
from beside import judged_beside

from gradcheck_dist.diagnosis.finding import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "averaging_gather_workers:train_all", VARIANTS)


@pytest.mark.parametrize("variant", ["both", "mean times ranks", "both times ranks"])
def test_what_makes_up_for_the_gather_accuses_nobody(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("come back through Gather" in reason for reason in report.reasons)


def test_what_is_left_of_the_factor_is_as_many_as_losses_are_added_up(reports: dict[str, Report]) -> None:
    assert any("but for x 2, as many as" in reason for reason in reports["both times ranks"].reasons)


def test_the_number_of_ranks_is_found_where_the_gather_does_not_average(reports: dict[str, Report]) -> None:
    (finding,) = reports["both times ranks, summed"].findings
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(4, rel=1e-4))

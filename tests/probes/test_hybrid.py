"""Two ways to split four ranks at once: what each of both does is told by its own name."""

from __future__ import annotations

import pytest
from beside import judged_beside
from hybrid_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "hybrid_workers:train_all", VARIANTS, num_ranks=4)


@pytest.mark.parametrize("variant", ["replicas averaged", "pipeline", "experts"])
def test_right_ones_are_clean(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert (report.verdict, report.reasons) == ("clean", [])
    assert report.coverage.parameters_observed == report.coverage.parameters_total


def test_parts_of_parameters_that_a_line_reduces_are_told_as_the_others(reports: dict[str, Report]) -> None:
    """The shards of a flat parameter cut one in two, whose parts are reduced apart."""
    (finding,) = reports["replicas summed"].findings
    assert finding.factor.observed == pytest.approx(2.0, rel=1e-5)
    assert finding.num_parameters == reports["replicas summed"].coverage.parameters_total
    assert finding.pattern == "every contribution x 2"


def test_a_gradient_that_is_scaled_on_the_way_is_told_so_below_a_wrapper_that_averages(
    reports: dict[str, Report],
) -> None:
    (finding,) = reports["pipeline, halved on the way"].findings
    assert finding.code == "GS202"
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-5)


def test_experts_that_are_summed_beside_shards_are_no_other_start(reports: dict[str, Report]) -> None:
    (finding,) = reports["experts, summed over both"].findings
    assert finding.code == "GS105"
    assert "broadcast them from one rank" in finding.fix

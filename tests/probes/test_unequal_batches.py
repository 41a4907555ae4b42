"""Ranks whose gradients weigh as much as their part of all batches does, whatever the loss counts."""

from __future__ import annotations

import pytest
from beside import judged_beside
from unequal_batch_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "unequal_batch_workers:train_all", VARIANTS)


@pytest.mark.parametrize(
    ("variant", "told"),
    [
        ("shares, coefficient", "elements weigh x 0.7 of what they would in one mean"),
        ("shares, coefficient, halved", "elements weigh x 0.35 of what they would in one mean"),
        ("shares, learned", "their shares of what all losses go over"),
        ("shares, labels learned", "weigh by how much their losses go over"),
    ],
)
def test_ranks_that_weigh_by_their_batches_are_not_accused(reports: dict[str, Report], variant: str, told: str) -> None:
    report = reports[variant]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(told in reason for reason in report.reasons), report.reasons


def test_a_factor_beside_shares_of_one_mean_is_found(reports: dict[str, Report]) -> None:
    (finding,) = reports["shares, learned, tripled"].findings
    assert finding.code == "GS000"


def test_sums_whose_factor_follows_ranks_are_no_coefficients_of_batches(reports: dict[str, Report]) -> None:
    (finding,) = reports["sums, doubled"].findings
    assert (finding.code, finding.factor.observed) == ("GS000", pytest.approx(2))
    assert finding.first_event is not None and finding.first_event.kind == "loss"


def test_what_becomes_of_gradients_that_the_program_gave_is_compared(reports: dict[str, Report]) -> None:
    right = reports["given"]
    assert (right.verdict, right.findings) == ("undetermined", [])
    (alone,) = reports["given, alone"].findings
    assert alone.code == "GS103"
    (tripled,) = reports["given, tripled"].findings
    assert (tripled.code, tripled.factor.observed) == ("GS000", pytest.approx(3))


def test_an_early_clip_of_what_counts_nothing_is_one_finding(reports: dict[str, Report]) -> None:
    (finding,) = reports["learned, clipped"].findings
    assert finding.code == "GS605"


def test_a_factor_that_undoes_the_division_behind_it_is_told_at_its_own_line(reports: dict[str, Report]) -> None:
    (finding,) = reports["learned, doubled"].findings
    assert (finding.code, finding.factor.observed) == ("GS000", pytest.approx(2))
    assert "data rank 1" in finding.pattern

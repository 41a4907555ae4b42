"""Beside a model that DDP reduces, a second one lacks no reduction where its optimizer combines momentum or updates in
its own step, or a line averages what that left."""

from __future__ import annotations

import pytest
from beside import judged_beside
from moved_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trainer.launch import warm_up

LACKING = ("alone", "signs alone", "adam alone", "alone later", "sent behind")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    return judged_beside(tmp_path_factory, "moved_workers:run", VARIANTS)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_only_parameters_that_nobody_combines_lack_a_reduction(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    how = variant.partition(", ")[0]
    assert [finding.code for finding in report.findings] == ["GS103"] * (how in LACKING), report.reasons
    assert report.verdict != "clean"


@pytest.mark.slow
def test_only_the_step_in_which_nobody_combined_lacks_one(reports: dict[str, Report]) -> None:
    assert [finding.steps for finding in reports["alone later, counted"].findings] == [[2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("votes, counted", "0.bias"),
        ("votes, counted", "moves these alike on all ranks"),
        ("warm up, counted", "moves these alike on all ranks"),
        ("averaged behind, counted", "lines average their values behind steps"),
    ],
)
def test_what_makes_up_for_it_is_named(reports: dict[str, Report], variant: str, words: str) -> None:
    reasons = reports[variant].reasons
    assert any(words in one for one in reasons), reasons

"""Gradients of which little can be seen accuse nobody, and hide nothing that others show."""

from __future__ import annotations

import pytest
from beside import judged_beside
from quiet_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "quiet_workers:train", VARIANTS)


def test_what_rounding_leaves_of_a_gradient_and_float16_drops_is_no_gradient(reports: dict[str, Report]) -> None:
    right = reports["float16 hook"]
    assert (right.verdict, [one.parameter for one in right.coverage.unidentifiable]) == ("clean", ["key.bias"])
    (finding,) = reports["float16 hook, halved"].findings
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-3)


def test_whose_gradients_of_one_direction_came_in_is_not_known(reports: dict[str, Report]) -> None:
    """Below one output a norm's bias gets multiples of one vector; what is gathered by hand is no recorded sum."""
    assert (reports["gathered"].verdict, reports["gathered"].findings) == ("clean", [])
    (finding,) = reports["gathered, not used"].findings
    assert finding.code == "GS103"


def test_a_mean_of_equal_gradients_is_each_of_them(reports: dict[str, Report]) -> None:
    """Signs add up to the same numbers on both ranks, in a bias below an L1 loss."""
    report = reports["gathered, signs"]
    assert report.findings == []
    assert "3.bias" in {one.parameter for one in report.coverage.unidentifiable}


def test_single_parameters_that_are_clipped_are_no_local_norm(reports: dict[str, Report]) -> None:
    assert (reports["clipped by parameter"].verdict, reports["clipped by parameter"].findings) == ("undetermined", [])


@pytest.mark.parametrize("name", ["unused head", "one batch's labels"])
def test_parameters_that_learn_nothing_say_nothing(reports: dict[str, Report], name: str) -> None:
    assert (reports[name].verdict, reports[name].findings) == ("clean", [])


def test_a_factor_of_lines_that_do_more_in_other_steps_is_no_loss_s(reports: dict[str, Report]) -> None:
    for name in ("running mean", "running mean between roots"):
        assert (reports[name].verdict, reports[name].findings) == ("undetermined", [])
    (finding,) = reports["constant"].findings
    assert finding.factor.observed == pytest.approx(1.2)


def test_a_coefficient_is_one_behind_a_clip_by_hand_too(reports: dict[str, Report]) -> None:
    report = reports["coefficient, clipped"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "0.5 x stands before the loss" in report.reasons[0]


def test_powersgd_averages_until_it_compresses(reports: dict[str, Report]) -> None:
    """Documented as a sum, it would be laid to the hook that the loss divides once too often."""
    (finding,) = reports["PowerSGD hook, halved"].findings
    assert (finding.code, finding.factor.observed) == ("GS101", pytest.approx(0.5, rel=1e-3))


def test_a_rank_whose_sequences_have_no_advantage_has_as_many_all_the_same(reports: dict[str, Report]) -> None:
    """Each sequence of the other rank weighs half of what it would if there were no more."""
    assert (reports["no advantage"].verdict, reports["no advantage"].findings) == ("undetermined", [])

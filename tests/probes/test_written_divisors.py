"""What a loop divides by on a line of its own is no fault where the losses lack just that, and none of what changes all
gradients besides is laid to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from beside import judged_beside
from written_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trainer.launch import warm_up

LINES = Path(__file__).with_name("written_workers.py").read_text().splitlines()
DIVISION, HELPER = (
    next(number for number, line in enumerate(LINES, 1) if line.endswith(mark))
    for mark in ("# the division", "# the helper")
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    return judged_beside(tmp_path_factory, "written_workers:run", VARIANTS)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_change_is_found_with_its_own_factor(reports: dict[str, Report], variant: str) -> None:
    _, before, behind, _ = variant.split(", ")
    expected = sorted(float(factor.removeprefix("seen ")) for factor in (before, behind) if factor != "1")
    findings = reports[variant].findings
    assert sorted(one.factor.observed or 0.0 for one in findings) == pytest.approx(expected, rel=1e-4)
    assert reports[variant].verdict == ("findings" if expected else "clean"), reports[variant].reasons
    assert {one.code for one in findings} <= {"GS000"}


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["3, seen 0.7, 0", "seen 3, seen 0.7, 0"])
def test_the_weights_are_right_without_all_that_is_found(reports: dict[str, Report], changed: str) -> None:
    """One line of a helper that is called from two places multiplies twice."""
    findings = reports[f"each, {changed}"].findings
    line = next(one for one in findings if one.factor.observed == pytest.approx(0.7))
    assert line.first_event is not None and line.first_event.line == HELPER
    assert line.first_event.observed_factor == pytest.approx(0.7)
    assert "Without it and what else is found the weights would be right" in line.explanation


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["3, 1, 0", "3, 0.7, 0", "3, 1, 0.01"])
def test_a_line_that_divides_other_gradients_by_then_is_not_named(reports: dict[str, Report], changed: str) -> None:
    """A loop reduces the second gradient when it has divided the first one."""
    found = next(one for one in reports[f"each, {changed}"].findings if one.factor.observed == pytest.approx(3))
    assert f"written_workers.py:{DIVISION}" not in found.explanation
    assert "between these two lines" in found.fix

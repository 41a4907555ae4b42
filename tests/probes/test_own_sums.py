"""Gradients that are reduced by hand: in tensors of the program's, which are not known in the first step, and in
`.grad`, to which lines write."""

from __future__ import annotations

import pytest
from own_sums_workers import LINES, STEPS, VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("runs")
    launch("own_sums_workers:train_all", (str(folder),), 2, timeout_s=90)
    return {variant: diagnose_run(folder / variant) for variant in (*VARIANTS, LINES)}


def test_right_sums_are_clean(reports: dict[str, Report]) -> None:
    assert (reports["right"].verdict, reports["right"].findings) == ("clean", [])


@pytest.mark.parametrize(
    ("variant", "factor", "codes"),
    [
        ("not divided by passes", 3.0, ["GS303"]),
        ("divided by ranks twice", 0.5, ["GS000", "GS101"]),
        ("added twice", 2.0, ["GS000", "GS104"]),
    ],
)
def test_one_fault_of_all_steps_is_told_once(
    reports: dict[str, Report], variant: str, factor: float, codes: list[str]
) -> None:
    (finding,) = reports[variant].findings
    assert finding.code in codes and finding.steps == list(range(STEPS))
    assert finding.factor.observed == pytest.approx(factor, rel=1e-4)


def test_lines_that_write_to_gradients_are_looked_at_before_one_that_may_have_done_it_to_losses(
    reports: dict[str, Report],
) -> None:
    (finding,) = reports[LINES].findings
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-4)
    assert finding.fix.startswith("Look at what your code does to .grad") and "Or: take it out at" in finding.fix

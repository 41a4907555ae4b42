"""Pipelines by hand whose ranks run several stages: each pass is given its loss by what was handed over."""

from __future__ import annotations

import pytest
from beside import judged_beside
from chunk_workers import IN_LINE, ROUND

from gradcheck_dist.diagnosis.finding import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    of_two = judged_beside(tmp_path_factory, "chunk_workers:train_round", ROUND)
    return of_two | judged_beside(tmp_path_factory, "chunk_workers:train_in_line", IN_LINE, num_ranks=4)


@pytest.mark.parametrize("variant", ["in a ring", "in a V", "in line"])
def test_all_stages_are_judged_by_the_tokens_of_their_losses(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert report.verdict == "clean"
    assert report.coverage.parameters_observed == report.coverage.parameters_total == 4 * 6 - 1
    assert {weight.contribution.accumulation_step for weight in report.weights} == {0, 1, 2}
    assert any("pipeline of 4 stages by hand" in note for note in report.coverage.notes)


@pytest.mark.parametrize(
    ("variant", "rank", "factor", "stages"),
    [
        ("in a ring, a chunk halved", 0, 0.5, {"2"}),
        ("in line, a stage halved", 2, 0.5, {"2"}),
        ("in line, weights twice", 1, 2.0, {"1"}),
    ],
)
def test_one_stage_that_is_scaled_is_told_alone(
    reports: dict[str, Report], variant: str, rank: int, factor: float, stages: set[str]
) -> None:
    (finding,) = reports[variant].findings
    assert finding.ranks == [rank]
    assert finding.factor.observed == pytest.approx(factor, rel=1e-5)
    assert {unit.partition(":")[0].removeprefix("stage ") for unit in finding.units} == stages
    assert finding.first_event is not None and (finding.first_event.file or "").endswith("chunk_workers.py")


def test_a_loss_that_is_divided_again_is_told_on_all_stages(reports: dict[str, Report]) -> None:
    (finding,) = reports["in a ring, divided again"].findings
    assert (finding.code, finding.ranks, finding.num_parameters) == ("GS303", [0, 1], 23)
    assert finding.factor.expression == "1/accumulation_steps"


@pytest.mark.parametrize("variant", ["in a ring, halved on the way", "in a ring, halved on the way, with a term"])
def test_a_factor_between_two_chunks_is_told_with_both_its_ends(reports: dict[str, Report], variant: str) -> None:
    """Beside a term the losses are read in another way, too, and the same events have to be there."""
    (finding,) = reports[variant].findings
    assert finding.code == "GS202"
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-5)
    assert {unit.partition(":")[0] for unit in finding.units} == {"stage 0", "stage 1"}


def test_a_stage_that_lost_a_pass_is_told_as_a_stage(reports: dict[str, Report]) -> None:
    report = reports["in line, a pass lost"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(
        "A stage that leaves out" in reason and "2 on rank 0, 3 on rank 1" in reason for reason in report.reasons
    )

"""Parameters that are whole while they are used, and lie on one rank or another when the optimizer comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.steps.never_read import leave_unread_open
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

VARIANTS = ("right", "summed", "flattened")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("uneven")
    results = launch("uneven_parts_workers:run", (list(VARIANTS), str(folder)), 2, timeout_s=90)
    for of_rank in results:
        assert all(bare == recorded for bare, recorded in of_rank)
    return {variant: diagnose(read_run(folder / variant)) for variant in VARIANTS}


def test_a_rank_that_steps_nothing_of_a_parameter_has_not_lost_its_gradient(reports: dict[str, Report]) -> None:
    """It was told as multiplied by 0 between the reduction and the optimizer."""
    assert (reports["right"].verdict, reports["right"].coverage.parameters_observed) == ("clean", 4)


def test_what_is_wrong_with_all_parts_is_found(reports: dict[str, Report]) -> None:
    (finding,) = reports["summed"].findings
    assert finding.factor.observed == pytest.approx(2)


def test_parts_of_another_shape_accuse_nobody(reports: dict[str, Report]) -> None:
    assert reports["flattened"].findings == []


def test_gradients_that_other_ranks_alone_read_are_told_as_that() -> None:
    """They were told as given to no optimizer."""
    parts = {(-1, "w (as on rank 0)"), (-1, "w (as on rank 1)")}
    verdict = SimpleNamespace(
        data=SimpleNamespace(complete=True),
        unread=SimpleNamespace(made=parts | {(-1, "v")}, read={(-1, "w (as on rank 0)")}),
        reasons=[],
    )
    leave_unread_open([cast("StepVerdict", verdict)])
    elsewhere, unread = verdict.reasons
    assert "w (as on rank 1)" in elsewhere and "read on other ranks alone" in elsewhere
    assert "(v)" in unread

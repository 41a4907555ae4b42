"""Gradients that no reduction reached, of parameters that some rank's loss does not reach, and those that one did."""

from __future__ import annotations

import pytest
from beside import judged_beside
from unreached_workers import FAULTY, VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trainer.launch import warm_up

NUM_PARAMETERS = {"not reduced": 5, "not reached": 5, "left out of reduce": 1}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    return judged_beside(tmp_path_factory, "unreached_workers:run", VARIANTS)


@pytest.mark.parametrize("variant", FAULTY)
def test_what_no_reduction_reached_is_one_finding(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert (finding.code, finding.num_parameters) == ("GS103", NUM_PARAMETERS[variant])
    assert finding.first_event is not None and finding.first_event.kind == "backward"


def test_a_gradient_of_other_ranks_alone_is_known_by_what_they_gave(reports: dict[str, Report]) -> None:
    report = reports["brought unseen"]
    assert (report.verdict, report.coverage.parameters_observed) == ("clean", 5)

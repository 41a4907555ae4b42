"""Gradients that no reduction reached are one finding, whichever of the parameters which rank's loss reaches."""

from __future__ import annotations

import pytest
from beside import judged_beside
from unreached_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trainer.launch import warm_up

NUM_PARAMETERS = {"not reduced": 5, "not reached": 5, "left out of reduce": 1}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    return judged_beside(tmp_path_factory, "unreached_workers:run", VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_no_reduction_reached_is_one_finding(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert (finding.code, finding.num_parameters) == ("GS103", NUM_PARAMETERS[variant])
    kind = "reduce" if variant == "left out of reduce" else "backward"  # that of the others is the line to change
    assert finding.first_event is not None and finding.first_event.kind == kind

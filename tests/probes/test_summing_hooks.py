"""Communication hooks of the program's that add up where losses ask for an average are named."""

from __future__ import annotations

import pytest
from summing_hook_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("hooks")
    launch("summing_hook_workers:run", (str(folder),), 2, timeout_s=100)
    return {variant: diagnose_run(folder / variant) for variant in VARIANTS}


@pytest.mark.parametrize("how", ["reduces", "exchanges"])
def test_a_hook_that_averages_is_clean(how: str, reports: dict[str, Report]) -> None:
    assert reports[f"{how} and divides"].verdict == "clean"


@pytest.mark.parametrize("how", ["reduces", "exchanges"])
def test_a_hook_that_adds_up_is_named_with_what_it_lacks(how: str, reports: dict[str, Report]) -> None:
    (finding,) = reports[how].findings
    assert (finding.code, round(finding.factor.observed or 0, 4)) == ("GS303", 2.0)
    assert "The communication hook summing_hook_workers.train.<locals>.hook adds up" in finding.explanation
    assert finding.fix.endswith("or let the hook divide by 2.")

"""A network and parts of it that learn one batch from one line, where not all of their losses have labels."""

from __future__ import annotations

from pathlib import Path

import pytest
from beside import in_memory, judged_beside
from parts_on_ranks_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run


def judged_both_ways(run: Path) -> Report:
    """In memory, and step by step as the command does, which keeps of a step only what the next one asks for."""
    report = in_memory(run)
    assert [finding.code for finding in diagnose_run(run).findings] == [finding.code for finding in report.findings]
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "parts_on_ranks_workers:train_all", VARIANTS, judge=judged_both_ways)


@pytest.mark.parametrize("variant", ["predicted", "regressed"])
def test_losses_of_parts_may_add_up(reports: dict[str, Report], variant: str) -> None:
    """The sandwich rule of slimmable networks: the passes have the same inputs, and other steps have other ones."""
    report = reports[variant]
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize("variant", ["predicted divided", "regressed divided"])
def test_their_mean_is_right_as_well(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


@pytest.mark.parametrize("variant", [one for one in VARIANTS if "summed" in one])
def test_a_division_by_ranks_that_lacks_is_found_beside_them(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert finding.code in {"GS104", "GS303"}
    assert finding.factor.expression == "world_size"


def test_batches_that_nobody_divides_are_found(reports: dict[str, Report]) -> None:
    (finding,) = reports["regressed batches"].findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")

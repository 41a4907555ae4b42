"""A rank whose losses, which count no tokens, are multiplied by a number of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def trained(folder: Path, numbers: tuple[float, ...], *rows: tuple[int, int]) -> Report:
    launch("element_workers:train_loud", (numbers, str(folder), *rows), 2, timeout_s=60)
    return diagnose(read_run(folder))


@pytest.mark.parametrize("number", [3.0, 0.5])
def test_the_same_number_in_all_steps_is_found(tmp_path: Path, number: float) -> None:
    (finding,) = trained(tmp_path / "run", (number,) * 3).findings
    assert (finding.code, finding.pattern) == ("GS000", f"x {number:g} on data rank 1, the rest right")
    assert finding.steps == [0, 1, 2]
    (event,) = [finding.first_event]
    assert event is not None and event.file is not None and event.file.endswith("element_workers.py")


def test_whoever_wants_the_first_finding_waits_for_the_step_that_bears_it_out(tmp_path: Path) -> None:
    launch("element_workers:train_loud", ((3.0,) * 3, str(tmp_path / "run")), 2, timeout_s=60)
    early: list[Report] = []
    report = diagnose_run(tmp_path / "run", first=True)
    diagnose_run(tmp_path / "run", early=early.append)
    for one in (report, *early):
        (finding,) = one.findings
        assert (finding.code, finding.steps) == ("GS000", [0, 1])
    assert len(early) == 1 and any("later steps were not judged" in problem for problem in report.coverage.problems)


@pytest.mark.parametrize("numbers", [(3.0, 2.0, 3.0), (3.0, 1.0, 3.0), (3.0,)])
def test_a_number_of_one_step_may_be_a_batch_s_own(tmp_path: Path, numbers: tuple[float, ...]) -> None:
    report = trained(tmp_path / "run", numbers)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("on data rank 1 it weighs x 3 of what it does elsewhere" in reason for reason in report.reasons)


@pytest.mark.parametrize("rows", [(4, 8), (8, 4)])
def test_what_ranks_losses_go_over_may_make_the_number(tmp_path: Path, rows: tuple[int, int]) -> None:
    trained(tmp_path / "run", (2.0,) * 3, rows)
    for objective in (None, "microbatch-mean"):
        report = diagnose(read_run(tmp_path / "run"), objective=objective)
        assert (report.verdict, report.findings) == ("undetermined", []), objective

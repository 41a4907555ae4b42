"""Trainers with bugs that were reported in public threads, and their mended twins."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Backward, RunEnd
from gradcheck_dist.ledger.names import distinct_names
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def judged(variant: str, folder: Path) -> Report:
    launch("field_workers:train", (variant, str(folder / "run")), 2, timeout_s=60)
    return diagnose(read_run(folder / "run"))


def test_modules_that_ranks_call_in_another_order_are_the_same(tmp_path: Path) -> None:
    report = judged("towers", tmp_path)
    assert (report.verdict, report.findings) == ("clean", [])
    run = read_run(tmp_path / "run")
    names, shapes = distinct_names(run), {rank: trace.params for rank, trace in run.ranks.items()}
    assert len({key for (rank, _), key in names.items() if rank == 1}) == 7
    for (rank, id), key in names.items():
        (other,) = [at for at in names if at[0] == 1 - rank and names[at] == key]
        assert shapes[rank][id].shape == shapes[other[0]][other[1]].shape
        assert shapes[rank][id].fingerprint == shapes[other[0]][other[1]].fingerprint


def test_what_every_pass_overwrites_is_one_finding(tmp_path: Path) -> None:
    (finding,) = judged("overwritten", tmp_path).findings
    assert (finding.code, finding.pattern) == ("GS401", "accumulation step 0 x 0, the rest x 1")
    assert finding.num_parameters == 7  # the embedding too, whose gradient is mostly zeros


def test_a_rank_that_was_killed_in_the_step_accuses_nobody(tmp_path: Path) -> None:
    assert not judged("cut", tmp_path).findings
    run = read_run(tmp_path / "run")
    events = run.ranks[1].events
    second = [event.seq for event in events if isinstance(event, Backward)][1]
    run.ranks[1].events = [event for event in events if event.seq < second and not isinstance(event, RunEnd)]
    report = diagnose(run)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "rank 1's trace lacks the last records" in " ".join(report.reasons)
    assert diagnose_run(tmp_path / "run").verdict == "undetermined"


def test_a_window_that_was_left_in_is_one_cause(tmp_path: Path) -> None:
    reports = {}
    for unfinished in ("stepped", "left in"):
        folder = tmp_path / unfinished
        launch("field_workers:train_epochs", (unfinished, str(folder)), 2, timeout_s=60)
        reports[unfinished] = diagnose(read_run(folder))
    assert (reports["stepped"].verdict, reports["stepped"].findings) == ("clean", [])
    (finding,) = reports["left in"].findings
    assert (finding.code, finding.factor.exact, finding.steps, finding.num_parameters) == ("GS303", "3/2", [1, 2], 5)
    assert "3 backward passes add up in this step, and the loss divides by 2" in finding.explanation


def test_clips_of_gradients_that_are_not_reduced_yet_are_early_and_not_unequal(tmp_path: Path) -> None:
    launch("field_workers:train_clipped", (str(tmp_path / "run"),), 2, timeout_s=60)
    assert {finding.code for finding in diagnose(read_run(tmp_path / "run")).findings} == {"GS605"}


@pytest.mark.parametrize(
    ("by", "verdict"),
    [
        ("running mean", "undetermined"),
        ("begins at them", "undetermined"),
        ("rounded", "findings"),
        ("another step", "findings"),
        ("before the shift", "findings"),
    ],
)
def test_a_number_of_each_ranks_own_accuses_nobody_where_it_counts_nothing(
    tmp_path: Path, by: str, verdict: str
) -> None:
    launch("field_workers:train_divided", (by, str(tmp_path / "run")), 2, timeout_s=60)
    for report in (diagnose(read_run(tmp_path / "run")), diagnose_run(tmp_path / "run")):
        assert report.verdict == verdict
        assert all(one.first_event is not None and one.first_event.kind == "loss" for one in report.findings)
        if not report.findings:
            assert "a running mean" in " ".join(report.reasons) and report.next_step

"""Bugs of public threads that had no place elsewhere, and the same trainers without them."""

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


def judged(worker: str, variant: str, folder: Path) -> Report:
    """By the command's way, too, which keeps of a step what a report needs."""
    launch("thread_workers:recorded", (worker, variant, str(folder / "run")), 2, timeout_s=60)
    report, step_by_step = diagnose(read_run(folder / "run")), diagnose_run(folder / "run")
    assert (step_by_step.verdict, step_by_step.findings) == (report.verdict, report.findings)
    return report


def line_of(report: Report) -> str:
    event = report.findings[0].first_event
    assert event is not None and event.line is not None
    return Path(__file__).with_name("thread_workers.py").read_text().splitlines()[event.line - 1].strip()


@pytest.mark.parametrize(
    ("variant", "line"),
    [
        ("alone", "optimizer.zero_grad()"),
        ("alone, None", "mean_of(model, step).backward()"),
        ("all", ""),
    ],
)
def test_a_step_that_one_rank_skips_is_one_finding(variant: str, line: str, tmp_path: Path) -> None:
    report = judged("skips", variant, tmp_path)
    assert [finding.code for finding in report.findings] == (["GS609"] if line else [])
    assert report.verdict == ("findings" if line else "clean")
    if line:
        (finding,) = report.findings
        assert (finding.steps, finding.pattern) == ([1], "skipped on rank 1, taken on rank 0")
        assert line_of(report) == line


@pytest.mark.parametrize(
    ("worker", "variant", "verdict"),
    [
        ("images", "givers", "undetermined"),
        ("images", "ranks", "clean"),
        ("images", "summed", "findings"),
        ("heals", "part", "undetermined"),
    ],
)
def test_a_mean_over_the_ranks_that_gave_something_accuses_nobody(
    worker: str, variant: str, verdict: str, tmp_path: Path
) -> None:
    report = judged(worker, variant, tmp_path)
    assert report.verdict == verdict
    assert bool(report.findings) == (verdict == "findings")
    if verdict == "undetermined":
        assert any("the mean over what was given alone" in reason for reason in report.reasons)


@pytest.mark.parametrize("variant", ["hook", "hook, summed"])
def test_a_replica_that_heals_in_some_steps_accuses_nobody(variant: str, tmp_path: Path) -> None:
    report = judged("quorum", variant, tmp_path)
    if variant == "hook":
        assert (report.verdict, report.findings) == ("undetermined", [])
        assert "nothing of data rank 1 is in any gradient of step 0" in report.reasons[0]
    else:
        (finding,) = report.findings
        assert (finding.code, finding.steps) == ("GS104", [1, 2])


def test_a_rank_without_a_batch_of_one_task_adds_up_fewer_losses(tmp_path: Path) -> None:
    """Of Ray's RLlib, whose policies train on some ranks alone."""
    for variant, words in (("givers", "the mean over what was given alone"), ("ranks", "each pass adds up several")):
        report = judged("policies", variant, tmp_path / variant)
        assert (report.verdict, report.findings) == ("undetermined", [])
        assert any(words in reason for reason in report.reasons)
    (finding,) = judged("policies", "summed", tmp_path / "summed").findings
    assert (finding.factor.expression, finding.num_parameters) == ("world_size", 10)


def test_a_count_that_is_not_reset_is_its_line_s_and_not_the_average_s(tmp_path: Path) -> None:
    assert judged("counted", "reset", tmp_path / "reset").verdict == "clean"
    report = judged("counted", "kept", tmp_path / "kept")
    (finding,) = report.findings
    assert (finding.code, finding.steps) == ("GS000", [1, 2])
    assert line_of(report) == "param.grad.mul_(1 / num_passes)"


def test_a_hook_that_weighs_means_by_tokens_and_divides_besides_is_one_fault(tmp_path: Path) -> None:
    assert judged("weighted", "once", tmp_path / "once").verdict == "clean"
    (finding,) = judged("weighted", "twice", tmp_path / "twice").findings
    assert (finding.code, finding.factor.expression) == ("GS000", "1/dp_replicate")
    assert finding.first_event is not None and finding.first_event.kind == "reduce"


def test_ranks_with_unequal_numbers_of_tasks_are_left_open(tmp_path: Path) -> None:
    report = judged("tasks", "right", tmp_path / "right")
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "adds up 2.5 losses on average, which weigh 2.5 times as much" in report.reasons[0]
    (finding,) = judged("tasks", "doubled", tmp_path / "doubled").findings
    assert finding.factor.observed == pytest.approx(5.0, rel=1e-4)

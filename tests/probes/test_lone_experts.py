"""Experts of one rank each, which FSDP2 shards over that rank alone, are no copies that nobody reduces."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.report.next_step import next_step
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.mark.parametrize(("divisor", "found"), [(2.0, []), (1.0, [("GS104", 2.0)])])
def test_their_divisor_is_judged(tmp_path: Path, divisor: float, found: list[tuple[str, float]]) -> None:
    warm_up()
    launch("lone_expert_workers:train", (str(tmp_path / "run"), divisor), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert [(one.code, pytest.approx(one.factor.observed)) for one in report.findings] == found
    assert report.verdict == ("findings" if found else "clean"), report.reasons


@pytest.mark.parametrize("divisor", [2.0, 1.0])
def test_what_an_expert_begins_with_alike_on_all_ranks_is_not_accused(tmp_path: Path, divisor: float) -> None:
    """A gain of ones beside weights that each rank drew for itself is a copy of nothing. What these weigh is told."""
    warm_up()
    launch("lone_expert_workers:train_gained", (str(tmp_path / "run"), divisor), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert report.reasons[0].startswith("the gradients of expert.gain are not reduced")
    told = "expert.inner.bias, expert.inner.weight, each rank's own, weigh x 2 of their part of the mean over all ranks"
    assert (told in report.reasons[0]) == (divisor == 1)
    assert next_step(report).startswith("Divide" if divisor == 1 else "Nothing to do")


@pytest.mark.parametrize("begins_alike", [False, True])
def test_heads_of_each_ranks_own_that_nobody_reduces_accuse_nobody(tmp_path: Path, begins_alike: bool) -> None:
    """Values tell them apart, and a task's head may follow the task's mean; a norm and a number beside them, too."""
    warm_up()
    launch("lone_expert_workers:train_own_head", (str(tmp_path / "run"), begins_alike), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    mine = "own_head.1.bias, own_head.1.weight are of some ranks alone, and so is what reaches them"
    alike = "own_head.0.bias, own_head.0.weight are not reduced and began alike on all ranks, beside parameters"
    assert (alike if begins_alike else mine) in report.reasons[0]
    assert not next_step(report).startswith("Divide")

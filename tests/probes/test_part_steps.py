"""Ranks that step by their own part of what was reduced and hand it on, and ranks that step one gradient by rates of
their own, accuse no gradient."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.reports.document import build
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch


@pytest.mark.parametrize(("written", "divided"), [(True, False), (True, True), (False, False)])
def test_parts_of_a_reduction_that_are_handed_on_behind_the_step_accuse_nobody(
    *, written: bool, divided: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launch("part_steps_workers:train_parts", (str(run), written, divided), 2, timeout_s=60)
    report = diagnose(read_run(run))
    assert bool(report.findings) == (divided or not written)
    assert any("ranks hand on what they stepped" in reason for reason in report.reasons) == (not report.findings)
    assert build(diagnose_run(run)) == build(report)


@pytest.mark.parametrize("doubled", [False, True])
def test_copies_that_rates_of_their_own_set_apart_lack_no_sum(*, doubled: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch("part_steps_workers:train_rates", (str(run), doubled), 2, timeout_s=60)
    report = diagnose(read_run(run))
    assert bool(report.findings) == doubled
    assert doubled or any("learning rates of their own" in reason for reason in report.reasons)
    assert build(diagnose_run(run)) == build(report)

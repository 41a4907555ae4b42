"""The screens say of a run what the commands say of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from recorded_runs import RUNS
from still_source import first_snapshot, settled
from tiny_runs import header, records, write_run

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Clip
from gradcheck_dist.stream.diagnose import diagnose
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path
from gradcheck_dist.tui.source import FolderSource


def shown(folder: Path) -> Report:
    """What the screens come to of a run that is over: a few steps are judged first, so that a verdict stands early."""
    for file in folder.glob("*.trace"):
        os.utime(file, (0, 0))
    source = FolderSource(folder)
    last = next(one for one in source.snapshots() if settled(one) and one.judged == one.recorded)
    source.stop()
    assert last.report is not None
    return last.report


@pytest.mark.parametrize("kind", [kind for kind in RUNS if "flipped" not in kind and "forged" not in kind])
def test_screens_and_commands_judge_alike(tmp_path: Path, kind: str) -> None:
    run = RUNS[kind](tmp_path / "run")
    screens, command = shown(run), diagnose(run)
    assert (screens.verdict, screens.reasons) == (command.verdict, command.reasons)
    assert len(screens.coverage.problems) == len(command.coverage.problems)
    assert [(one.code, one.step, one.steps) for one in screens.findings] == [
        (one.code, one.step, one.steps) for one in command.findings
    ]


@pytest.mark.parametrize("wish", [{"axes": {"dp_shard": 7}}, {"same_data": [[0, 7]]}])
def test_a_wish_that_the_run_cannot_meet_is_told_on_screens_too(tmp_path: Path, wish: dict[str, object]) -> None:
    run = write_run(tmp_path / "run", declared=wish)
    assert shown(run).coverage.problems == diagnose(run).coverage.problems != []


def test_of_norms_that_differ_between_ranks_the_first_ranks_is_told_everywhere(tmp_path: Path) -> None:
    folder = create_run_dir(tmp_path / "run", {"world_size": 2})
    for rank in range(2):
        writer = TraceWriter(trace_path(folder, rank), header(rank), background=False)
        for batch in records(rank, fault=None):
            for record in batch:
                if isinstance(record, Clip):
                    record.total_norm = 3.0 + rank
                writer.append(record)
        writer.close()
    assert first_snapshot(folder).series.grad_norm == ((0, 3.0),)
    assert diagnose(folder).metrics["grad_norm"] == [3.0]

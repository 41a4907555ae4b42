"""Runs that are too large to be measured whole: compared as documented, found all the same, and said to be so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from still_source import StillSource, first_snapshot, screen_text, settled
from tiny_runs import SOURCE_LINE, header, records, write_run

from gradcheck_dist.diagnosis.finding import Factor, Finding, FirstEvent
from gradcheck_dist.events import Clip, Event, Norms, OptimizerStep, Plan
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.columns import ColumnWriter
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path
from gradcheck_dist.tui import judge
from gradcheck_dist.tui.app import WatchApp
from gradcheck_dist.tui.documented_view import lanes_of
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.tui.source import FolderSource


def columns_of(rank: int, steps: int, faulty: int | None) -> Iterator[list[object]]:
    """The records of a rank by step, as they are written with --every-step; `faulty` averages what should be summed."""
    column_writer, made = None, []
    healthy, averaged = (list(records(rank, steps=steps, fault=fault)) for fault in (None, "averaged"))
    for step, batch in enumerate(healthy):
        chosen = averaged[step] if step == faulty else batch
        column_writer = column_writer or ColumnWriter(made.append)
        made += [record for record in chosen if type(record).__name__ in ("Param", "ParamSet", "Plan")]
        events = [record for record in chosen if isinstance(record, Event) and type(record).__name__ != "RunEnd"]
        column_writer.add(step, events)
        column_writer.flush()
        yield [*made, *(record for record in chosen if type(record).__name__ == "RunEnd")]
        made.clear()


def write_columns(folder: Path, steps: int = 12, faulty: int | None = 7) -> Path:
    create_run_dir(folder, {"world_size": 2})
    for rank in range(2):
        writer = TraceWriter(trace_path(folder, rank), header(rank, columns=True), background=False)
        for batch in columns_of(rank, steps, faulty):
            for record in batch:
                writer.append(record)
            writer.flush()
        writer.close()
    return folder


def shown(snapshot: Snapshot, *keys: str, size: tuple[int, int] = (110, 34)) -> str:
    """The screen after these keys."""

    async def run() -> str:
        app = WatchApp(StillSource(snapshot), "run")
        async with app.run_test(size=size) as pilot:
            async with asyncio.timeout(20):
                while app.shown is not snapshot:
                    await pilot.pause(0.01)
            await pilot.press(*keys)
            await pilot.pause()
            return screen_text(app)

    return asyncio.run(run())


def test_steps_in_columns_are_judged_as_they_are_read_and_lead_to_their_line(tmp_path: Path) -> None:
    folder = write_columns(tmp_path / "run")
    snapshot = first_snapshot(folder)
    assert snapshot.report == diagnose_run(folder)
    assert [finding.steps for finding in snapshot.report.findings] == [[7]]
    assert snapshot.recorded == snapshot.judged == tuple(range(12))
    assert len(snapshot.series.loss) == len(snapshot.series.grad_norm) == 12
    assert "documented / expected = 0.5" in shown(snapshot)
    event = shown(snapshot, "d")
    assert "FIRST DIVERGENCE" in event
    assert f"errors.py:{SOURCE_LINE}" in event
    weights = shown(snapshot, "2")
    assert "as documented: no sample was measured" in weights
    assert weights.count("▼ 1/2") == 6
    timeline = shown(snapshot, "3", "j")
    assert "reduce ddp avg" in timeline
    assert "event number" in timeline


def test_a_step_in_columns_that_is_right_is_shown_too(tmp_path: Path) -> None:
    snapshot = first_snapshot(write_columns(tmp_path / "run"), step=3)
    assert snapshot.step is not None
    assert snapshot.step.step == 3
    assert shown(snapshot, "2").count("= 1") >= 6
    assert "FIRST DIVERGENCE" not in shown(snapshot, "4")


def test_columns_of_a_growing_run_are_compared_as_they_come(tmp_path: Path) -> None:
    folder = create_run_dir(tmp_path / "run", {"world_size": 2})
    writers = [TraceWriter(trace_path(folder, rank), header(rank, columns=True), background=False) for rank in (0, 1)]
    source = FolderSource(folder)
    snapshots = source.snapshots()
    for batches in zip(*(columns_of(rank, 4, 2) for rank in (0, 1)), strict=True):
        for writer, batch in zip(writers, batches, strict=True):
            for record in batch:
                writer.append(record)
            writer.flush()
        next(snapshots)
    for writer in writers:
        writer.close()
    deadline = time.monotonic() + 30
    last = next(one for one in snapshots if (settled(one) and len(one.judged) == 4) or time.monotonic() > deadline)
    source.stop()
    assert last.report == diagnose_run(folder)
    assert last.report.findings


def test_of_many_ranks_recorded_operations_are_compared_and_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "MANY_RANKS", 1)
    monkeypatch.setattr(judge, "MAX_MEASURED_RANKS", 1)
    snapshot = first_snapshot(write_run(tmp_path / "run", steps=3, fault="averaged"))
    assert snapshot.report is not None
    assert snapshot.report.verdict == "findings"
    finding = snapshot.report.findings[0]
    assert finding.steps == [0, 1, 2]
    assert finding.factor.observed == pytest.approx(0.5)
    assert "not measured" in finding.explanation
    assert f"errors.py:{SOURCE_LINE}" in shown(snapshot, "d")
    assert "as documented" in shown(snapshot, "2")


def test_where_a_step_is_measured_its_samples_are_right_and_not_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "MANY_RANKS", 1)
    snapshot = first_snapshot(write_run(tmp_path / "run", steps=3, fault="averaged"))
    assert snapshot.report is not None
    assert [finding.code for finding in snapshot.report.findings] == ["GS101"]
    assert snapshot.report.findings[0].steps == [0, 1, 2]
    healthy = first_snapshot(write_run(tmp_path / "healthy", steps=3, fault=None))
    assert healthy.report is not None
    assert healthy.report.verdict == "clean"
    assert not healthy.report.findings


def test_the_lanes_of_a_thousand_ranks_are_those_that_are_accused_and_the_first() -> None:
    finding = msgspec.structs.replace(diagnosed_at(512), ranks=[512, 600])
    lanes = lanes_of(range(1024), [finding])
    assert lanes[:4] == [512, 600, 0, 1]
    assert len(lanes) == 64


def diagnosed_at(rank: int) -> Finding:
    return Finding(
        code="GS000", name="x", severity="error", step=0, factor=Factor(observed=2.0), pattern="", units=[],
        num_parameters=0, ranks=[rank], first_event=FirstEvent(rank=rank, seq=0, kind="loss"), explanation="", fix="",
    )  # fmt: skip


def test_norms_that_probes_recorded_are_on_the_chart_where_nothing_clips(tmp_path: Path) -> None:
    folder = create_run_dir(tmp_path / "run", {"world_size": 2})
    for rank in range(2):
        writer = TraceWriter(trace_path(folder, rank), header(rank), background=False)
        for step, batch in enumerate(records(rank, steps=2, fault=None)):
            stepped = next(record for record in batch if isinstance(record, OptimizerStep))
            rows = np.array([(i, i, 0) for i in range(4)], dtype="<i4").tobytes()
            norms = Norms(step=step, seq=stepped.seq, rows=rows, values=np.array([3.0, 4.0, 0.0, 0.0]).tobytes())
            for record in [one for one in batch if not isinstance(one, Clip)]:
                if isinstance(record, Plan):
                    record.offset, record.extent = (0,), (32,)
                writer.append(record)
            writer.append(norms)
            writer.flush()
        writer.close()
    assert first_snapshot(folder).series.grad_norm == ((0, 5.0), (1, 5.0))


def test_a_clipped_norm_is_shown_before_and_after(tmp_path: Path) -> None:
    folder = create_run_dir(tmp_path / "run", {"world_size": 1})
    writer = TraceWriter(trace_path(folder, 0), header(0, 1), background=False)
    for batch in records(0, world=1, fault=None):
        for record in batch:
            if isinstance(record, Clip):
                record.total_norm, record.coefficient, record.max_norm = 8.0, 0.25, 2.0
            writer.append(record)
    writer.close()
    assert "grad norm 8→2" in shown(first_snapshot(folder))

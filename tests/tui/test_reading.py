"""What the screens read of a run: lightly, in pieces, and in the end all of it."""

from __future__ import annotations

import math
import random
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from still_source import settled
from tiny_runs import header, records, write_run

from gradcheck_dist.events import Event
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.reader import read_trace
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path
from gradcheck_dist.tui import judge, live_run
from gradcheck_dist.tui.grid import COLUMN_SLICES, ROW_SLICES, Entry, WeightGrid, fill, slice_grid, worst_cell
from gradcheck_dist.tui.live_run import LiveRun
from gradcheck_dist.tui.rank_file import RankFile
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.tui.source import FolderSource


def read(file: RankFile, limit: int) -> list[object]:
    taken: list[object] = []
    file.look()
    while file.scan(taken.append, limit):
        pass
    return taken


def by_seq(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.seq)


@pytest.mark.parametrize("limit", [100, 5000, 1 << 20])
def test_a_file_read_in_pieces_gives_what_the_reader_gives(tmp_path: Path, limit: int) -> None:
    path = trace_path(write_run(tmp_path / "run", steps=5), 0)
    file, whole = RankFile(path), read_trace(path)
    assert len(read(file, limit)) == file.num_events == len(whole.events)
    loaded = file.load(range(5))
    assert loaded is not None
    assert by_seq(loaded.events) == by_seq(whole.events)
    assert loaded.samples == whole.samples
    assert (loaded.params, loaded.plans, loaded.param_sets) == (whole.params, whole.plans, whole.param_sets)
    assert file.ended
    assert file.last_step == 4
    assert file.cut == ""


def test_of_one_step_only_that_step_is_loaded(tmp_path: Path) -> None:
    file = RankFile(trace_path(write_run(tmp_path / "run", steps=5), 0))
    read(file, 1 << 20)
    loaded = file.load([3])
    assert loaded is not None
    assert [samples.step for samples in loaded.samples] == [3]
    # What was ever reduced stays known: one reduction of each set of parameters, whatever its step.
    assert {(type(event).__name__, event.step) for event in loaded.events if event.step != 3} == {
        ("Reduce", 0),
        ("RunEnd", 4),
    }


def test_a_file_that_grows_by_pieces_of_frames_is_counted_once(tmp_path: Path) -> None:
    whole = trace_path(write_run(tmp_path / "whole", steps=4), 0).read_bytes()
    growing, generator = tmp_path / "rank-00000.trace", random.Random(0)
    growing.touch()
    file, taken, at = RankFile(growing), [], 0
    while at < len(whole):
        step = generator.randrange(1, 3000)
        with growing.open("ab") as end:
            end.write(whole[at : at + step])
        at += step
        file.look()
        while file.scan(taken.append):
            pass
    assert len(taken) == file.num_events == len(read_trace(growing).events)
    assert file.behind == 0


@pytest.mark.long
def test_a_long_run_shows_its_ranks_before_it_is_read_and_in_the_end_all_its_steps_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_run, "BUDGET_S", 0.0)
    monkeypatch.setattr(judge, "MAX_STEPS", 6)
    folder = create_run_dir(tmp_path / "run", {"world_size": 3})
    for rank in range(3):
        with closing(TraceWriter(trace_path(folder, rank), header(rank, 3), background=False)) as writer:
            healthy, faulty = (list(records(rank, world=3, steps=70, fault=fault)) for fault in (None, "averaged"))
            for batch in [*healthy[:30], faulty[30], *healthy[31:]]:
                for record in batch:
                    writer.append(record)
                writer.flush()
    source = FolderSource(folder)
    snapshots = list_until_settled(source)
    first = snapshots[0]
    assert first.report is None
    assert first.loading.startswith("reading")
    assert [line.state for line in first.ranks] == ["ended"] * 3
    assert first.last_step == 69
    clean = next(snapshot for snapshot in snapshots if snapshot.judged == (0, 1, 2, 67, 68, 69))
    assert not clean.report.findings
    assert any("judging all steps" in snapshot.loading for snapshot in snapshots)
    last = snapshots[-1]
    assert last.judged == last.recorded == tuple(range(70))
    assert last.report == diagnose_run(folder)
    assert [finding.steps for finding in last.report.findings] == [[30]]
    assert last.step.step == 30
    assert len(last.series.loss) == 70


def list_until_settled(source: FolderSource) -> list[Snapshot]:
    snapshots: list[Snapshot] = []
    deadline = time.monotonic() + 60
    for snapshot in source.snapshots():
        snapshots.append(snapshot)
        if settled(snapshot) or time.monotonic() > deadline:
            break
    source.stop()
    return snapshots


def test_no_step_is_whole_while_a_rank_has_not_been_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "BUDGET_S", 0.0)
    folder = create_run_dir(tmp_path / "run", {"world_size": 2})
    for rank, steps in ((0, 2), (1, 1)):
        writer = TraceWriter(trace_path(folder, rank), header(rank), background=False)
        for batch in records(rank, steps=steps, end=False):
            for record in batch:
                writer.append(record)
            writer.flush()
        writer.close()
    run = LiveRun(folder)
    run.poll()
    assert run.live
    assert run.whole_steps() == [0]


@pytest.mark.parametrize(
    ("ratios", "place"),
    [
        ([[1.0, 1.0], [1.0, 4.0]], (1, 1)),
        ([[8.0, 1.0], [0.1, 1.0]], (1, 0)),
        ([[8.0, 0.0], [0.1, 1.0]], (0, 1)),
        ([[math.nan, 2.0], [2.0 + 1e-9, 1.0]], (0, 1)),
        ([[2.0, 1e-9], [-2e-9, 2.0]], (0, 1)),
        ([[2.0, 1e-3], [1e-4, 2.0]], (1, 0)),
        ([[math.nan, math.nan], [math.nan, math.nan]], None),
    ],
)
def test_the_worst_cell_is_the_first_of_those_farthest_from_1(
    ratios: list[list[float]], place: tuple[int, int] | None
) -> None:
    assert worst_cell(grid_of(np.array(ratios))) == place


def test_a_merged_cell_shows_the_worst_of_those_it_stands_for() -> None:
    ratio = np.exp2(np.random.default_rng(0).integers(-3, 4, size=(6, 8)).astype(float))
    ratio[2, 3], ratio[4, 5] = math.nan, 0.0
    grid = grid_of(ratio, keys=[(d, k, m) for d in range(2) for k in range(2) for m in range(2)])
    distance = np.where(np.isnan(ratio), -1.0, np.abs(np.log2(np.where(ratio == 0, 1e-300, ratio))))
    for rows in ROW_SLICES[:3]:
        for columns in COLUMN_SLICES:
            part = slice_grid(grid, rows, columns)
            for r in range(part.shape[0]):
                for c in range(part.shape[1]):
                    block = np.ix_(part.row_groups[r], part.column_groups[c])
                    assert distance[part.at(r, c)] == distance[block].max()


def grid_of(ratio: np.ndarray, keys: list[tuple[int, int, int]] | None = None) -> WeightGrid:
    columns = keys or [(0, k, 0) for k in range(ratio.shape[1])]
    entries = [
        Entry((f"unit {r % 2}", r), columns[c], (1.0, 1.0, ratio[r, c], ratio[r, c]), "1", 1)
        for r in range(ratio.shape[0])
        for c in range(ratio.shape[1])
    ]
    order = sorted(range(ratio.shape[0]), key=lambda r: (f"unit {r % 2}", r))
    grid = fill(entries, 0, 1e-5)
    assert [row[1] for row in grid.rows] == order
    # In the order of the test: rows of a grid are sorted by unit.
    return WeightGrid(
        0,
        tuple(grid.rows[order.index(r)] for r in range(ratio.shape[0])),
        grid.columns,
        grid.values[:, [order.index(r) for r in range(ratio.shape[0])]],
        {},
        {},
        1e-5,
    )

"""Damaged, empty, foreign and half-written folders: a clear screen, never a traceback."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from spoiled import forge, spoil
from still_source import StillSource, first_snapshot, screen_text, settled
from tiny_runs import header, records, write_run

from gradcheck_dist.events import SCHEMA_VERSION, Clip, Site
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path
from gradcheck_dist.tui.app import SCREENS, WatchApp
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.tui.source import FolderSource, others_inside


def screens(snapshot: Snapshot, size: tuple[int, int] = (100, 30)) -> dict[str, str]:
    """All seven screens over a snapshot, as text."""
    texts = {}

    async def run() -> None:
        app = WatchApp(StillSource(snapshot), "run")
        async with app.run_test(size=size) as pilot:
            async with asyncio.timeout(20):
                while app.shown is not snapshot:
                    await pilot.pause(0.01)
            for index, mode in enumerate(SCREENS, 1):
                await pilot.press(str(index))
                await pilot.pause()
                texts[mode] = screen_text(app)
                for key in ("down", "enter"):
                    await pilot.press(key)
                await pilot.pause()

    asyncio.run(run())
    return texts


def empty(folder: Path) -> str:
    return "No rank has written into"


def nothing(folder: Path) -> str:
    folder.rmdir()
    return "There is no folder"


def a_file(folder: Path) -> str:
    folder.rmdir()
    folder.write_text("hello")
    return "is a file, not a run folder"


def foreign(folder: Path) -> str:
    (folder / "rank-00000.trace").write_bytes(b"PK\x03\x04 something else entirely")
    return "is not a gradcheck trace"


def zero_bytes(folder: Path) -> str:
    (folder / "rank-00000.trace").write_bytes(b"")
    return "no whole record"


def another_version(folder: Path) -> str:
    TraceWriter(trace_path(folder, 0), header(0, 1, schema_version=99), background=False).close()
    return "schema version 99"


def another_manifest(folder: Path) -> str:
    write_run(folder, world=1)
    (folder / "manifest.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    return f"schema version {SCHEMA_VERSION + 1}"


@pytest.mark.parametrize(
    "spoil", [empty, nothing, a_file, foreign, zero_bytes, another_version, another_manifest], ids=lambda f: f.__name__
)
def test_a_folder_that_holds_no_run_is_explained_on_every_screen(spoil: Callable[[Path], str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    words = spoil(folder)
    for stale in folder.glob("*.trace") if folder.is_dir() else ():
        make_old(stale)
    texts = screens(first_snapshot(folder), size=(110, 30))
    waits = spoil in (empty, nothing, zero_bytes)  # for somebody who is about to write
    for mode, text in texts.items():
        assert words in unwrapped(text), mode
        assert (" WAITING " in text, " REPLAY " in text) == (waits, not waits), mode


def unwrapped(text: str) -> str:
    return " ".join(text.replace("│", " ").replace("┃", " ").split())


def make_old(file: Path) -> None:
    os.utime(file, (1_700_000_000, 1_700_000_000))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", world=2, ranks=(0,))
    text = screens(first_snapshot(folder))["overview"]
    assert "rank 1 missing" in text
    assert "COULD NOT JUDGE" in text


def test_a_dead_rank_with_a_cut_trace_is_shown_as_such(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", end=False)
    file = trace_path(folder, 1)
    file.write_bytes(file.read_bytes()[:-7])
    for rank in (0, 1):
        make_old(trace_path(folder, rank))
    snapshot = first_snapshot(folder)
    assert [line.state for line in snapshot.ranks] == ["dead", "dead"]
    text = unwrapped(screens(snapshot, size=(200, 40))["overview"])
    assert "rank 1 dead" in text
    assert "cut inside a frame" in text


@pytest.mark.parametrize("fault, end, shown", [(None, False, 1), (None, True, 2), ("repeated", False, 0)])
def test_a_run_that_was_cut_off_opens_on_its_last_whole_step(
    tmp_path: Path, fault: str | None, end: bool, shown: int
) -> None:
    folder = create_run_dir(tmp_path / "run", {"id": "run", "world_size": 2})
    for rank in (0, 1):
        writer = TraceWriter(trace_path(folder, rank), header(rank), background=False)
        batch = [one for part in records(rank, steps=3, fault=fault) for one in part]
        cut = next(at for at, one in enumerate(batch) if isinstance(one, Clip) and one.step == 2)
        for record in batch if end or rank == 0 else batch[:cut]:
            writer.append(record)
        writer.close()
        make_old(trace_path(folder, rank))
    snapshot = first_snapshot(folder)
    assert snapshot.recorded == (0, 1, 2)
    assert snapshot.step is not None
    assert snapshot.step.step == shown
    newest, cut_off = first_snapshot(folder, step=-1).step, first_snapshot(folder, step=2).step
    assert newest is not None
    assert cut_off is not None
    assert (newest.step, cut_off.step) == (2 if end else 1, 2)


@pytest.mark.parametrize("seed", [2, 3], ids=["checksums tell", "nothing tells"])
def test_whatever_is_cut_off_or_flipped_every_screen_stands(tmp_path: Path, seed: int) -> None:
    folder = spoiled_run(tmp_path / "run", write_run(tmp_path / "whole", steps=2), seed)
    texts = screens(first_snapshot(folder))
    assert all(text.strip() for text in texts.values())


@pytest.mark.filterwarnings("error::RuntimeWarning")  # of numpy, on numbers that nobody measured: none is printed
def test_two_hundred_spoiled_runs_are_shown_or_explained(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", steps=2)
    phases: Counter[str] = Counter()
    for seed in range(200):
        folder = spoiled_run(tmp_path / "run", whole, seed)
        snapshot = first_snapshot(folder)
        phases[snapshot.phase] += 1
        assert "please report" not in snapshot.message, f"seed {seed}: {snapshot.message}"
        assert snapshot.report is not None or snapshot.message, seed
        shutil.rmtree(folder)
    assert phases["ready"] > 100
    assert phases["error"] > 10


def spoiled_run(folder: Path, whole: Path, seed: int) -> Path:
    """Every second run is damaged so that checksums tell, the others so that they do not."""
    generator = random.Random(seed)
    shutil.copytree(whole, folder)
    for file in sorted(folder.glob("*.trace")):
        file.write_bytes((forge if seed % 2 else spoil)(file.read_bytes(), generator))
        if generator.random() < 0.8:
            make_old(file)
    return folder


def test_names_from_a_trace_come_out_inert(tmp_path: Path) -> None:
    evil = "[bold red]x[/]\x1b]0;owned\x07\x1b[2J[@click=app.quit]y[/]"
    names = (f"layers.{evil}.weight", "[/nonsense].weight", "a\nb.weight")
    site = Site(f"/tmp/{evil}.py", 3, evil)
    folder = write_run(tmp_path / "run", names=names, site=site)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"id": evil, "scenario": evil, "variant": "[red]"}))
    texts = screens(first_snapshot(folder), size=(160, 50))
    for mode, text in texts.items():
        assert "\x1b" not in text, mode
        assert "\x07" not in text, mode
    assert "[bold red]x[/]" in texts["overview"]
    assert "[/nonsense]" in texts["parameters"]


def test_a_folder_of_variants_opens_the_faulty_one(faulty_run: Path) -> None:
    snapshot = first_snapshot(faulty_run.parent)
    assert snapshot.path == str(faulty_run)
    assert snapshot.siblings == (str(faulty_run.parent / "fixed"),)
    told = others_inside(faulty_run.parent)
    assert told == f"{faulty_run.parent} holds 2 runs. This is {faulty_run.name}; beside it (6 compares): fixed."
    assert others_inside(faulty_run) == ""


def test_what_is_told_is_on_the_screen_as_it_opens() -> None:
    async def run() -> None:
        app = WatchApp(StillSource(Snapshot("runs/a")), "runs", told="runs holds 2 runs [x].")
        async with app.run_test() as pilot:
            await pilot.pause()
            assert [one.message for one in app._notifications] == ["runs holds 2 runs [x]."]

    asyncio.run(run())


def test_a_run_that_goes_away_while_it_is_watched_keeps_its_last_screen(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    source = FolderSource(folder)
    snapshots = source.snapshots()
    assert next(one for one in snapshots if settled(one)).phase == "ready"
    shutil.rmtree(folder)
    later = next(snapshots)
    assert later.phase in ("ready", "error")
    assert later.report is not None or later.message
    source.stop()


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_a_live_run_is_followed_from_its_first_byte_to_its_end(tmp_path: Path) -> None:
    folder = create_run_dir(tmp_path / "run", {"world_size": 2})
    clock = Clock(time.time())
    source = FolderSource(folder, clock=clock)
    snapshots = source.snapshots()
    assert next(snapshots).phase == "waiting"
    writers = [TraceWriter(trace_path(folder, rank), header(rank), background=False) for rank in (0, 1)]
    batches = [list(records(rank, steps=2)) for rank in (0, 1)]
    clock.now += 1
    assert until(snapshots, clock, lambda s: s.phase == "recording").live
    for step in (0, 1):
        for rank in (0, 1):
            for record in batches[rank][step]:
                writers[rank].append(record)
            writers[rank].flush()
        shown = until(snapshots, clock, lambda s, step=step: s.phase == "ready" and step in s.judged)  # type: ignore[misc]
        assert shown.report is not None
        assert shown.report.verdict == "findings"
    for writer in writers:
        writer.close()
    assert not shown.live
    assert [line.state for line in shown.ranks] == ["ended", "ended"]
    source.stop()


def until(snapshots: object, clock: Clock, wanted: Callable[[Snapshot], bool]) -> Snapshot:
    for _ in range(20):
        snapshot: Snapshot = next(snapshots)  # type: ignore[call-overload]
        if wanted(snapshot):
            return snapshot
        clock.now += 0.6
    raise AssertionError(f"not reached: {snapshot}")


def test_a_rank_that_falls_silent_while_others_write_is_dead(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", end=False)
    make_old(trace_path(folder, 1))
    clock = Clock(time.time())
    snapshot = next(FolderSource(folder, clock=clock).snapshots())
    assert [line.state for line in snapshot.ranks] == ["running", "dead"]
    assert snapshot.live


def test_pausing_freezes_the_display_and_takes_up_again(faulty_run: Path, tmp_path: Path) -> None:
    first = first_snapshot(faulty_run)

    async def run() -> None:
        app = WatchApp(StillSource(replace(first, live=True)), "run")
        async with app.run_test(size=(80, 24)) as pilot:
            while app.shown.phase == "reading":
                await pilot.pause(0.01)
            await pilot.press("space")
            assert "PAUSED" in screen_text(app)
            app.snapshot = replace(first, num_events=99_999, live=True)
            await pilot.pause()
            assert "99999" not in screen_text(app)
            assert "newer data waits" in screen_text(app)
            await pilot.press("space")
            await pilot.pause()
            assert "99999 events" in screen_text(app)
            await pilot.press("f")
            assert app.source.asked_step[-1] == -1  # type: ignore[attr-defined]
            assert "following" in screen_text(app)
            await pilot.press("f")
            assert app.source.asked_step[-1] is None  # type: ignore[attr-defined]

    asyncio.run(run())

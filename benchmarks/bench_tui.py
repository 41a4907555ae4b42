"""The screens: first frame, CPU of a scroll or a slice, event to paint beside a fast writer, opening a large run.

python benchmarks/bench_tui.py [--quick] [--only TEXT]
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from big_run import EVENTS_PER_STEP, NAMES, NUM_POSITIONS, header, one_step, tables, write_big_run
from measure import alternate, arguments, keep, paired_ratio
from scale_trace import write as write_columns
from textual._compositor import CompositorUpdate

from gradcheck_dist.events import Metric
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path
from gradcheck_dist.tui.app import WatchApp
from gradcheck_dist.tui.grid import WeightGrid, slice_grid
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.tui.source import FolderSource
from gradcheck_dist.tui.widgets.heatmap import Heatmap

SIZE = (160, 50)
_EMPTY = """
import time
from textual.app import App
class Empty(App):
    def on_mount(self): self.call_after_refresh(self.exit)
Empty().run(headless=True)
print(time.process_time())
"""
_WATCH = """
import sys, time
from pathlib import Path
from gradcheck_dist.tui.app import WatchApp
from gradcheck_dist.tui.source import FolderSource
class First(WatchApp):
    def on_mount(self): self.call_after_refresh(self.exit)
    def _watch(self): pass
First(FolderSource(Path(sys.argv[1])), sys.argv[1]).run(headless=True)
print(time.process_time())
"""
_OPEN = "import sys; sys.path.insert(0, {here!r}); import bench_tui; bench_tui.open_until({run!r}, {ranks})"
_VERDICT = "import sys; sys.path.insert(0, {here!r}); import bench_tui; bench_tui.verdict_of({run!r})"
VERDICT_S = 60.0


class PaintingApp(WatchApp):
    """Makes the terminal's bytes of every frame, as a real terminal gets them, and tells when a frame is done."""

    num_frames = 0
    num_bytes = 0
    on_paint: Callable[[], None] | None = None

    def _display(self, screen: Any, renderable: Any) -> None:
        super()._display(screen, renderable)
        if isinstance(renderable, CompositorUpdate):
            self.num_bytes += len(renderable.render_segments(self.console).encode())
            self.num_frames += 1
            if self.on_paint is not None:
                self.on_paint()


def first_frame(quick: bool) -> dict[str, Any]:
    """CPU of a process from its start to its first frame, beside an empty Textual app, alternating."""
    with tempfile.TemporaryDirectory() as folder:

        def cpu(script: str) -> float:
            command = [sys.executable, "-c", script, folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            return float(done.stdout.split()[-1])

        times = alternate({"empty": lambda: cpu(_EMPTY), "watch": lambda: cpu(_WATCH)}, 1 if quick else 9)
    return {
        "empty_ms": round(statistics.median(times["empty"]) * 1e3),
        "watch_ms": round(statistics.median(times["watch"]) * 1e3),
        "times_empty": paired_ratio(times["watch"], times["empty"]),
    }


class NoSource:
    """Nothing to watch: the benchmark puts things on the screen itself."""

    def snapshots(self) -> Iterator[Snapshot]:
        yield from ()

    def stop(self) -> None: ...

    def show_step(self, step: int | None) -> None: ...

    def compare_with(self, path: str) -> None: ...


def large_grid(num_rows: int = 1024, num_columns: int = 4096) -> WeightGrid:
    """1024 holders, 1024 data ranks x 4 accumulation steps."""
    ratio = np.exp2(np.random.default_rng(0).integers(-3, 4, size=(num_rows, num_columns)).astype(float))
    values = np.stack([np.full_like(ratio, 1e-6), ratio * 1e-6, ratio * 1e-6, ratio])
    columns = tuple((index // 4, index % 4, 0) for index in range(num_columns))
    rows = tuple((f"layers.{index % 32}.attention", index) for index in range(num_rows))
    return WeightGrid(0, rows, columns, values, dict.fromkeys(columns, "1/1000000"), dict.fromkeys(columns, 100), 1e-5)


def frames(quick: bool) -> dict[str, Any]:
    """CPU of one key on a large map, from the key to the bytes for the terminal; the harness' own share beside it."""
    return asyncio.run(_frames(quick))


async def _frames(quick: bool) -> dict[str, Any]:
    grid = large_grid()
    grid.warm()  # as the judging thread does
    app = PaintingApp(NoSource(), "bench", mode="weights")
    results: dict[str, Any] = {"cells": grid.values[3].size, "size": list(SIZE)}
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(0.5)
        app.screen.query_one("#body").display = True
        heatmap = app.screen.query_one(Heatmap)
        slices = {"slice_ms": ("units x ranks", "contributions"), "slice_merged_ms": ("units", "accumulation steps")}
        for name, (rows, columns) in slices.items():
            spent = []
            for _ in range(3 if quick else 9):
                start = time.process_time()
                heatmap.show(slice_grid(grid, rows, columns))
                await painted(app, lambda: asyncio.sleep(0.002))
                spent.append(time.process_time() - start)
            results[name] = round(statistics.median(spent) * 1e3, 1)
        heatmap.show(slice_grid(grid, "units x ranks", "contributions"))
        heatmap.focus()
        for name, key in (("harness_ms", "z"), ("page_down_ms", "pagedown"), ("column_ms", "right")):
            await pilot.pause()
            start, count, before = time.process_time(), 5 if quick else 28, app.num_frames
            for _ in range(count):
                await pilot.press(key)
            results[name] = round((time.process_time() - start) / count * 1e3, 1)
            results[name.replace("_ms", "_frames")] = round((app.num_frames - before) / count, 2)
    return results


async def painted(app: PaintingApp, wait: Callable[[], Awaitable[None]]) -> None:
    """Until one more frame is out."""
    before, deadline = app.num_frames, time.monotonic() + 5
    while app.num_frames == before and time.monotonic() < deadline:
        await wait()


def live(quick: bool) -> dict[str, Any]:
    """Event to paint at 100 000 events a second of 8 ranks, with whole steps among them that are judged meanwhile."""
    return asyncio.run(_live(seconds=2.0 if quick else 12.0))


async def _live(rate: int = 100_000, ranks: int = 8, seconds: float = 12.0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = create_run_dir(Path(folder) / "run", {"world_size": ranks})
        call = f"bench_tui.write({str(run)!r}, {rate}, {ranks}, {seconds})"
        script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import bench_tui; {call}"
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        app = PaintingApp(FolderSource(run), str(run))
        delays: list[float] = []
        seen: dict[int, int] = {}

        def on_paint() -> None:
            now = time.time() * 1e3
            for line in app.shown.ranks:
                if line.last_step is not None and line.last_step > 1e9:
                    # An event a millisecond stands for all: they come evenly.
                    stamps = range(seen.get(line.rank, line.last_step - 1) + 1, line.last_step + 1)
                    delays.extend(now - stamp for stamp in stamps)
                    seen[line.rank] = line.last_step

        app.on_paint = on_paint
        async with app.run_test(size=(120, 40)):
            start, began = time.process_time(), time.monotonic()
            while child.poll() is None:
                await asyncio.sleep(0.05)
            spent, took = time.process_time() - start, time.monotonic() - began
            written = int((child.stdout.read() if child.stdout else "0").split()[-1])
            deadline = time.monotonic() + 10
            while app.shown.num_events < written and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            shown, judged = app.shown.num_events, len(app.shown.judged)
    delays.sort()
    p50, p99 = (round(delays[int(len(delays) * share)]) for share in (0.5, 0.99))
    return {
        "events_per_s": round(written / seconds),
        "ranks": ranks,
        "written": written,
        "shown": shown,
        "steps_judged": judged,
        "p50_ms": p50,
        "p99_ms": p99,
        "cpu_share_of_a_core": round(spent / took, 3),
        "load_average": round(os.getloadavg()[0], 1),
    }


def write(run: str, rate: int, ranks: int, seconds: float) -> None:
    """Write events whose `step` is the wall clock in ms, and two whole steps a second."""
    leaf = np.random.default_rng(0).normal(size=(ranks, len(NAMES), NUM_POSITIONS)).astype("<f4")
    total = leaf.mean(axis=0)
    writers = []
    for rank in range(ranks):
        writers.append(TraceWriter(trace_path(run, rank), header(rank, ranks), background=False))
        for table in tables():
            writers[rank].append(table)
    began, seq, steps = time.monotonic(), 0, 0
    while (now := time.monotonic() - began) < seconds:
        due, stamp = int(now * rate), int(time.time() * 1e3)
        while seq < due:
            seq += 1
            metric = Metric(seq=(1 << 40) + seq, t_ns=stamp, step=stamp, name="x", value=1.0)
            writers[seq % ranks].append(metric)
        if now * 2 >= steps:
            for rank, writer in enumerate(writers):
                for record in one_step(steps, ranks, leaf[rank], total):
                    writer.append(record)
            steps += 1
        for writer in writers:
            writer.flush()
        time.sleep(0.01)
    print(seq + steps * ranks * EVENTS_PER_STEP)


def opening(quick: bool) -> dict[str, Any]:
    """From the process' start to the state of all ranks on the screen, on a run of gigabytes in the page cache."""
    ranks, steps = (64, 50) if quick else (1024, 1000)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "big"
        num_bytes = write_big_run(run, ranks, steps)
        script = _OPEN.format(here=str(Path(__file__).parent), run=str(run), ranks=ranks)
        rounds = []
        for _ in range(1 if quick else 3):
            start = time.time()
            command = [sys.executable, "-c", script, str(start)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            rounds.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return {"ranks": ranks, "steps": steps, "gigabytes": round(num_bytes / 1e9, 2), **medians}


def open_until(run: str, ranks: int) -> None:
    """Watch until all ranks are painted; prints wall and CPU seconds since the process' start, and memory."""
    import resource

    started = float(sys.argv[1])
    app = PaintingApp(FolderSource(Path(run)), run)

    def on_paint() -> None:
        if sum(line.state == "ended" for line in app.shown.ranks) == ranks:
            app.on_paint = None
            found = {
                "wall_s": round(time.time() - started, 2),
                "cpu_s": round(time.process_time(), 2),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "load_average": round(os.getloadavg()[0], 1),
            }
            print(json.dumps(found))
            app.exit()

    app.on_paint = on_paint

    async def main() -> None:
        async with app.run_test(size=SIZE):
            while app.on_paint is not None:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def verdict(quick: bool) -> dict[str, Any]:
    """From the process' start to the first divergence and to the whole verdict, of a run in columns and of one whose
    every step was recorded event by event; CPU with that of the process that compares."""
    ranks, steps, microbatches = (32, 40, 8) if quick else (1024, 1000, 64)
    with tempfile.TemporaryDirectory() as folder:
        columns, plain = Path(folder) / "columns", Path(folder) / "plain"
        write_columns(columns, ranks, steps, microbatches)
        found = {f"columns_{name}": value for name, value in _verdict(columns).items()}
        shutil.rmtree(columns)
        write_big_run(plain, max(ranks, 128), steps)
        found |= {f"plain_{name}": value for name, value in _verdict(plain).items()}
    return {"ranks": ranks, "steps": steps, "contributions": ranks * steps * microbatches, **found}


def _verdict(run: Path) -> dict[str, Any]:
    script = _VERDICT.format(here=str(Path(__file__).parent), run=str(run))
    command = [sys.executable, "-c", script, str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=VERDICT_S + 30, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def verdict_of(run: str) -> None:
    """Watch until all is judged, or VERDICT_S have passed; prints seconds, and how far it came."""
    started = float(sys.argv[1])
    app = PaintingApp(FolderSource(Path(run)), run)
    found: dict[str, Any] = {"first_s": None, "whole_s": None}

    async def main() -> None:
        longest, before = 0.0, time.monotonic()
        async with app.run_test(size=SIZE):
            while time.time() - started < VERDICT_S and found["whole_s"] is None:
                await asyncio.sleep(0.01)
                longest, before = max(longest, time.monotonic() - before - 0.01), time.monotonic()
                shown = app.shown
                if found["first_s"] is None and shown.report is not None and shown.report.findings:
                    found["first_s"] = round(time.time() - started, 2)
                    found["first_cpu_s"] = round(time.process_time(), 2)
                if shown.phase == "ready" and not shown.loading:
                    found["whole_s"] = round(time.time() - started, 2)
            found["steps_judged"] = len(app.shown.judged)
        found["cpu_s"] = round(sum(os.times()[:4]), 2)
        found["longest_wait_of_the_screens_ms"] = round(longest * 1e3)

    asyncio.run(main())
    print(json.dumps(found))


PARTS = {"first_frame": first_frame, "frames": frames, "live": live, "opening": opening, "verdict": verdict}


def main() -> None:
    chosen = arguments(__doc__ or "")
    results = {}
    for name, part in PARTS.items():
        if chosen.only in name:
            results[name] = part(chosen.quick)
            print(name, *(f"{key}={value}" for key, value in results[name].items()), flush=True)
    if not chosen.only:
        keep("tui", results, quick=chosen.quick)


if __name__ == "__main__":
    main()

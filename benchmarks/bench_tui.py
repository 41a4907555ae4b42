"""The screens: first frame against an empty Textual app, CPU of a scroll or a slice on a large map, event to paint.

python benchmarks/bench_tui.py
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gradcheck_dist.events import SCHEMA_VERSION, Header, Metric
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path
from gradcheck_dist.tui.app import WatchApp
from gradcheck_dist.tui.grid import WeightGrid, slice_grid
from gradcheck_dist.tui.source import FolderSource
from gradcheck_dist.tui.widgets.heatmap import Heatmap

ROUNDS = 7
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


def first_frame() -> None:
    """CPU seconds of a process from its start to its first frame, alternating."""
    times: dict[str, list[float]] = {"empty": [], "watch": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, script in (("empty", _EMPTY), ("watch", _WATCH)):
                done = subprocess.run(
                    [sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=60, check=True
                )
                times[name].append(float(done.stdout.split()[-1]))
    empty, watch = (statistics.median(times[name]) for name in ("empty", "watch"))
    print(f"first frame: empty {empty * 1e3:.0f} ms CPU, watch {watch * 1e3:.0f} ms, ratio {watch / empty:.2f}")


def large_grid(num_rows: int = 1024, num_columns: int = 4096) -> WeightGrid:
    """1024 holders, 1024 data ranks x 4 accumulation steps."""
    ratio = np.exp2(np.random.default_rng(0).integers(-3, 4, size=(num_rows, num_columns)).astype(float))
    values = np.stack([np.full_like(ratio, 1e-6), ratio * 1e-6, ratio * 1e-6, ratio])
    columns = tuple((index // 4, index % 4, 0) for index in range(num_columns))
    rows = tuple((f"layers.{index % 32}.attention", index) for index in range(num_rows))
    return WeightGrid(0, rows, columns, values, dict.fromkeys(columns, "1/1000000"), dict.fromkeys(columns, 100), 1e-5)


async def frames() -> None:
    """CPU of one key press, from the key to the painted frame."""
    grid = large_grid()
    app = WatchApp(FolderSource(Path("/nonexistent")), "bench", mode="weights")
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.pause(0.5)
        screen = app.screen
        screen.query_one("#body").display = True
        heatmap = screen.query_one(Heatmap)
        started = time.process_time()
        heatmap.show(slice_grid(grid, "units x ranks", "contributions"))
        heatmap.refresh()
        print(f"slice of {grid.values[3].size:,} cells: {(time.process_time() - started) * 1e3:.1f} ms CPU")
        for rows, columns in (("units", "accumulation steps"), ("ranks", "data ranks")):
            started = time.process_time()
            slice_grid(grid, rows, columns)
            print(f"slice {rows} x {columns}: {(time.process_time() - started) * 1e3:.1f} ms CPU")
        heatmap.focus()
        for name, key in (("a key that does nothing", "z"), ("page down", "pagedown"), ("column right", "right")):
            await pilot.pause()
            started, count = time.process_time(), 40
            for _ in range(count):
                await pilot.press(key)
            spent = (time.process_time() - started) / count * 1e3
            print(f"{name}: {spent:.1f} ms CPU a key, frame and test harness included")
        started = time.process_time()
        for _ in range(20):
            for y in range(heatmap.size.height):
                heatmap.render_line(y)
        print(f"one frame of {heatmap.size.height} lines: {(time.process_time() - started) / 20 * 1e3:.2f} ms CPU")


async def live(rate: int = 100_000, ranks: int = 8, seconds: float = 4.0) -> None:
    """Event to paint at `rate` events a second: writer threads are another process's work, here a child's."""
    with tempfile.TemporaryDirectory() as folder:
        run = create_run_dir(Path(folder) / "run", {"world_size": ranks})
        here = str(Path(__file__).parent)
        call = f"bench_tui.write({str(run)!r}, {rate}, {ranks}, {seconds})"
        script = f"import sys; sys.path.insert(0, {here!r}); import bench_tui; {call}"
        child = subprocess.Popen([sys.executable, "-c", script])
        app = WatchApp(FolderSource(run), str(run))
        delays: list[float] = []
        async with app.run_test(size=(120, 40)):
            start, last = time.process_time(), 0
            began = time.monotonic()
            while child.poll() is None or time.monotonic() - began < seconds + 2:
                await asyncio.sleep(0.005)
                shown = app.shown
                if shown.num_events != last and shown.ranks:
                    last = shown.num_events
                    delays += [time.time() - line.last_step / 1e3 for line in shown.ranks if line.last_step]
                if child.poll() is not None and last >= rate * seconds * 0.99:
                    break
            spent = (time.process_time() - start) / (time.monotonic() - began)
        delays.sort()
        if delays:
            p50, p99 = (delays[int(len(delays) * share)] for share in (0.5, 0.99))
            times = f"p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms"
            print(f"live {rate} events/s, {ranks} ranks: {last:,} shown, {times}, {spent:.0%} of a core")


def write(run: str, rate: int, ranks: int, seconds: float) -> None:
    """Write events whose `step` is the wall clock in ms."""
    writers = []
    for rank in range(ranks):
        head = Header(
            schema_version=SCHEMA_VERSION, tool_version="", rank=rank, world_size=ranks, pid=1, started_unix_s=0.0
        )
        writers.append(TraceWriter(trace_path(run, rank), head, background=False))
    began, seq = time.monotonic(), 0
    while (now := time.monotonic() - began) < seconds:
        due = int(now * rate)
        stamp = int(time.time() * 1e3)
        while seq < due:
            seq += 1
            writers[seq % ranks].append(Metric(seq=seq, t_ns=stamp, step=stamp, name="x", value=1.0))
        for writer in writers:
            writer.flush()
        time.sleep(0.01)


if __name__ == "__main__":
    first_frame()
    asyncio.run(frames())
    asyncio.run(live())

"""What a trace costs to write, how soon a reader sees it, and what a killed rank loses.

    python benchmarks/bench_trace.py [--quick]

Costs are process CPU time. The killed ranks are real processes that get SIGKILL at a random moment: whatever they had
been told is written (flush returned) must be found in the file, and nothing in it may be damaged but its end.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import arguments, cpu_s, keep

from gradcheck_dist.events import SCHEMA_VERSION, Backward, Header, Metric, Samples, Site
from gradcheck_dist.trace.reader import TraceTail, read_trace
from gradcheck_dist.trace.writer import TraceWriter

SAMPLE_SIZE = 96
ROWS = 156
"""Rows of samples of one step: 39 parameters at a leaf, after backward, before clipping and before the optimizer."""
SITE = Site("train.py", 42, "train_step")


def header() -> Header:
    return Header(
        schema_version=SCHEMA_VERSION,
        tool_version="bench",
        rank=0,
        world_size=1,
        pid=os.getpid(),
        started_unix_s=time.time(),
    )


def backward(seq: int) -> Backward:
    return Backward(seq=seq, t_ns=time.time_ns(), step=seq // 8, site=SITE, accumulation_step=seq % 8, params=3,
                    duration_ns=1_234_567)  # fmt: skip


def write_cost(folder: Path, rounds: int) -> dict[str, Any]:
    """ns of CPU and bytes per event and per row of samples, medians over rounds; both through flush."""
    num_events, num_records = 2000, 20
    rows = np.zeros((ROWS, 4), dtype="<i4").tobytes()
    values = np.random.default_rng(0).standard_normal(ROWS * SAMPLE_SIZE).astype(np.float32).tobytes()
    per_event, per_row, bytes_event, bytes_row = [], [], 0.0, 0.0
    for index in range(rounds):
        writer = TraceWriter(folder / f"{index}.trace", header(), background=False)

        def events(writer: TraceWriter = writer) -> None:
            for seq in range(num_events):
                writer.append(backward(seq))
                if seq % 10 == 9:  # about the events of a step
                    writer.flush()

        def samples(writer: TraceWriter = writer) -> None:
            for step in range(num_records):
                writer.append(Samples(step=step, rows=rows, dtype="float32", values=values))
                writer.flush()

        start = writer.num_bytes
        per_event.append(cpu_s(events) / num_events * 1e9)
        bytes_event = (writer.num_bytes - start) / num_events
        start = writer.num_bytes
        per_row.append(cpu_s(samples) / num_records / ROWS * 1e9)
        bytes_row = (writer.num_bytes - start) / num_records / ROWS
        writer.close()
    return {
        "ns_per_event": round(statistics.median(per_event)),
        "bytes_per_event": round(bytes_event, 1),
        "ns_per_row": round(statistics.median(per_row)),
        "bytes_per_row": round(bytes_row, 1),
        "values_per_row": SAMPLE_SIZE,
        "num_rounds": rounds,
    }


def tail_latency(path: Path, seconds: float, poll_s: float = 0.01) -> dict[str, Any]:
    """From an event's own time stamp to its arrival in a reader that polls, when nobody calls flush."""
    child = os.fork()
    if child == 0:
        writer = TraceWriter(path, header())
        end, seq = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            writer.append(Metric(seq=seq, t_ns=time.time_ns(), step=0, name="x", value=1.0))
            seq += 1
            time.sleep(0.002)
        writer.close()
        os._exit(0)
    while not path.exists():
        time.sleep(0.001)
    tail, latencies, seen = TraceTail(path), [], 0
    running = True
    while running:
        running = os.waitpid(child, os.WNOHANG)[0] == 0
        tail.poll()
        now = time.time_ns()
        events = tail.trace.events if tail.trace else []
        latencies += [(now - event.t_ns) / 1e6 for event in events[seen:]]
        seen = len(events)
        time.sleep(poll_s)
    latencies.sort()
    return {
        "p50_ms": round(statistics.median(latencies), 1),
        "p99_ms": round(latencies[int(len(latencies) * 0.99)], 1),
        "poll_ms": poll_s * 1e3,
        "num_events": seen,
    }


def kill_once(path: Path, generator: random.Random) -> tuple[int, int, int]:
    """(events that were acknowledged, events found, stretches of damage before the end) of one killed process."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        writer = TraceWriter(path, header(), background=False)
        seq = 0
        while True:
            for _ in range(20):
                writer.append(backward(seq))
                seq += 1
            writer.append(Samples(step=seq, rows=bytes(16 * 8), dtype="float32", values=bytes(4 * SAMPLE_SIZE * 8)))
            writer.flush()
            os.write(write_end, struct.pack("<q", seq))
    os.close(write_end)
    acknowledged = os.read(read_end, 8)  # the process is at work
    time.sleep(generator.random() * 0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with contextlib.closing(os.fdopen(read_end, "rb")) as pipe:
        acknowledged += pipe.read()
    last = struct.unpack_from("<q", acknowledged, len(acknowledged) // 8 * 8 - 8)[0]
    trace = read_trace(path)
    size = path.stat().st_size
    inner = sum(damage.offset + damage.num_bytes < size for damage in trace.damage)
    path.unlink()
    return last, len(trace.events), inner


def kill_test(path: Path, rounds: int, limit_s: float = 60.0) -> dict[str, Any]:
    """Many killed processes, for at most `limit_s`."""
    generator, end = random.Random(0), time.monotonic() + limit_s
    lost = damaged = ran = acknowledged = 0
    while ran < rounds and time.monotonic() < end:
        told, found, inner = kill_once(path, generator)
        lost += max(0, told - found)
        damaged += inner
        acknowledged += told
        ran += 1
    return {"num_rounds": ran, "acknowledged": acknowledged, "acknowledged_lost": lost, "damaged_inside": damaged}


def main() -> int:
    """Print, keep, and fail when an acknowledged event was lost."""
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cost = write_cost(folder, 3 if options.quick else 15)
        print(f"write: {cost['ns_per_event']} ns and {cost['bytes_per_event']} bytes an event (10 a flush), "
              f"{cost['ns_per_row']} ns and {cost['bytes_per_row']} bytes a row of {SAMPLE_SIZE} samples")  # fmt: skip
        tail = tail_latency(folder / "tail.trace", 0.5 if options.quick else 5.0)
        print(f"live tail, polled every {tail['poll_ms']:g} ms: {tail['p50_ms']} ms median, {tail['p99_ms']} ms p99")
        killed = kill_test(folder / "killed.trace", 10 if options.quick else 1000)
        print(f"{killed['num_rounds']} killed ranks: {killed['acknowledged_lost']} of {killed['acknowledged']} "
              f"acknowledged events lost, {killed['damaged_inside']} traces damaged before their end")  # fmt: skip
    keep("trace", {"write": cost, "tail": tail, "kill": killed}, quick=options.quick)
    return 1 if killed["acknowledged_lost"] or killed["damaged_inside"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Recorded runs of which bytes or whole frames are lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from column_runs import moved
from simulator import Process, World

from gradcheck_dist.events import AnyRecord, Param, ParamSet, Plan, Samples, StepEnd
from gradcheck_dist.trace.frames import MAGIC, Damage, frame, iter_frames
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path


def write_in_frames(folder: Path, worlds: list[World], generator: random.Random) -> Path:
    """One step of each world as a rank writes them: samples beside their events, counted when a step ends, in frames
    that end with a step and, as a timer ends them, anywhere."""
    for world in worlds:
        world.run()
    create_run_dir(folder, {"world_size": len(worlds[0].ranks)})
    for rank, process in enumerate(worlds[0].ranks):
        writer = TraceWriter(trace_path(folder, rank), process.trace.header, background=False)
        for record in _tables(process):
            writer.append(record)
        for step, world in enumerate(worlds):
            for record in _step(world.ranks[rank], step):
                writer.append(record)
                if generator.random() < 0.15 or isinstance(record, StepEnd):
                    writer.flush()
        writer.close()
    return folder


def _tables(process: Process) -> Iterator[AnyRecord]:
    trace = process.trace
    tables: list[Param | Plan] = [*trace.params.values(), *trace.plans.values()]
    yield from tables
    for id, params in trace.param_sets.items():
        yield ParamSet(id=id, params=params)


def _step(process: Process, step: int) -> Iterator[AnyRecord]:
    first = 1000 * step
    events = [moved(event, step, first) for event in process.trace.events]
    kept, since = np.array(process.rows, dtype="<i4").reshape(-1, 4) + np.array([first, 0, 0, 0]), 0
    sizes = np.cumsum([0, *(len(values) for values in process.values)])
    for event in events:
        # What was sampled up to here; a pass is told when it is over, after the reductions in it.
        until = int((kept[:, 0] <= event.seq).sum()) if not isinstance(event, StepEnd) else len(kept)
        if isinstance(event, StepEnd) or until - since > 12:
            yield _samples(process, step, kept[since:until], sizes[since], sizes[until])
            since = until
        if isinstance(event, StepEnd):
            event = msgspec.structs.replace(event, num_events=len(events), num_rows=len(kept), num_norms=0)
        yield event  # type: ignore[misc]


def _samples(process: Process, step: int, rows: np.ndarray, start: int, end: int) -> Samples:
    whole, size = process.trace.samples[0], 2 if process.trainer.dtype == "bfloat16" else 4
    return Samples(step=step, rows=rows.astype("<i4").tobytes(), dtype=whole.dtype,
                   values=whole.values[start * size : end * size])  # fmt: skip


def lose(data: bytes, generator: random.Random) -> bytes:
    """A trace that lost something behind its header: flipped bits, a zeroed or skipped stretch, frames, its end."""
    pieces = [piece for piece, _ in iter_frames(data, len(MAGIC)) if not isinstance(piece, Damage)]
    start = len(MAGIC) + len(frame(bytes(pieces[0])))
    first, last = sorted((generator.randrange(start, len(data)), generator.randrange(start, len(data))))
    kind = generator.choice(["bits", "zeros", "skipped", "frames", "cut"])
    if kind == "bits":
        spoiled = bytearray(data)
        for _ in range(generator.randrange(1, 4)):
            spoiled[generator.randrange(start, len(data))] ^= 1 << generator.randrange(8)
        return bytes(spoiled)
    if kind == "zeros":
        last = min(last, first + 4096)
        return data[:first] + bytes(last - first) + data[last:]
    if kind == "skipped":
        return data[:first] + data[last:]
    if kind == "frames":
        gone = {generator.randrange(1, len(pieces)) for _ in range(generator.randrange(1, 3))}
        return MAGIC + b"".join(frame(bytes(piece)) for index, piece in enumerate(pieces) if index not in gone)
    return data[:first]


def damage(run: Path, generator: random.Random) -> None:
    """Lose something of one or two ranks' traces."""
    files = sorted(run.glob("rank-*.trace"))
    for file in generator.sample(files, min(len(files), generator.randrange(1, 3))):
        file.write_bytes(lose(file.read_bytes(), generator))

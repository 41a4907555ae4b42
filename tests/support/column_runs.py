"""Runs whose steps stand in columns, out of simulated trainers of which the truth is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
from random_trainers import global_mean
from simulator import Key, Trainer, World

from gradcheck_dist.events import Event, Loss, LossGradient, ParamSet, StepEnd
from gradcheck_dist.trace.columns import ColumnWriter
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path


def write_columns(folder: Path, worlds: list[World], samples_of: int | None = None) -> Path:
    """The steps of some worlds of one trainer, as a rank writes them; `samples_of`: a step that is written whole."""
    create_run_dir(folder, {"world_size": len(worlds[0].ranks)})
    for world in worlds:
        world.run()
    for rank, process in enumerate(worlds[0].ranks):
        header = msgspec.structs.replace(process.trace.header, columns=True)
        writer = TraceWriter(trace_path(folder, rank), header, background=False)
        for record in (*process.trace.params.values(), *process.trace.plans.values()):
            writer.append(record)
        for id, params in process.trace.param_sets.items():
            writer.append(ParamSet(id=id, params=params))
        columns = ColumnWriter(writer.append)
        for step, world in enumerate(worlds):
            first = 1000 * step
            trace = world.ranks[rank].trace
            events = [moved(event, step, first) for event in sorted(trace.events, key=lambda event: event.seq)]
            if step == samples_of:
                end = StepEnd(seq=len(trace.events) + 1000, t_ns=0, step=step, duration_s=0.1, probe_s=0.0)
                for event in (*trace.events, end):
                    writer.append(msgspec.structs.replace(event, step=step))
                for sample in trace.samples:
                    writer.append(msgspec.structs.replace(sample, step=step))
            else:
                columns.add(step, events)
        columns.flush()
        writer.close()
    return folder


def moved(event: Event, step: int, first: int) -> Event:
    """An event of another step."""
    changes = {"step": step, "seq": event.seq + first}
    if isinstance(event, Loss | LossGradient):
        changes["loss_id"] = event.loss_id + first
    return msgspec.structs.replace(event, **changes)


def off_in_one(key: Key, tokens: dict[Key, int]) -> float:
    return (3.0 if key == (1, 1, 0) else 1.0) * 2 / sum(tokens.values())


RIGHT = Trainer(global_mean(2.0), data_ranks=2, accumulation=3)
WRONG = replace(RIGHT, root=off_in_one)


def one_wrong(folder: Path, *, steps: int = 12, wrong: int = 7, samples_of: int | None = None) -> Path:
    worlds = [World(WRONG if step == wrong else RIGHT, seed=step) for step in range(steps)]
    return write_columns(folder, worlds, samples_of)

"""Recorded runs of several steps, of every kind that a judge of single steps could get wrong: findings in some steps or
in all, what only several steps decide, steps that do not count, and whatever happens to files."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from column_runs import RIGHT, WRONG, moved, one_wrong
from random_trainers import global_mean
from simulator import Hand, Trainer, World
from small_runs import write_run
from spoiled import forge, spoil

from gradcheck_dist.events import AmpUnscale, AnyRecord, Backward, NamedGroup, OptimizerStep, ParamSet, ParamValues
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path

Tables = Callable[[int], Sequence[AnyRecord]]
FSDP = Trainer(global_mean(4.0), impl="fsdp", data_ranks=4, accumulation=2, clip=1.0)
PIPELINE = Trainer(global_mean(2.0), stages=2, data_ranks=2, microbatches=3)
SUMMED = Trainer(global_mean(), op="sum", data_ranks=2)
AMP = Trainer(global_mean(2.0), accumulation=2, loss_scale=1024.0)


def write_steps(
    folder: Path,
    trainers: list[Trainer],
    *,
    skipped: int = -1,
    blind: int = -1,
    late: bool = False,
    tables: Tables = lambda rank: [],
) -> Path:
    """One step of each trainer, samples included. `skipped`: a step that overflowed; `blind`: one whose passes reached
    no parameter that was watched; `late`: samples come a step later, as an accelerator delivers them; `tables`: more of
    them, by rank."""
    worlds = [World(trainer, seed=step) for step, trainer in enumerate(trainers)]
    for world in worlds:
        world.run()
    create_run_dir(folder, {"world_size": len(worlds[0].ranks)})
    for rank, process in enumerate(worlds[0].ranks):
        writer = TraceWriter(trace_path(folder, rank), process.trace.header, background=False)
        for record in (*process.trace.params.values(), *process.trace.plans.values(), *tables(rank)):
            writer.append(record)
        for id, params in process.trace.param_sets.items():
            writer.append(ParamSet(id=id, params=params))
        waiting = []
        for step, world in enumerate(worlds):
            trace = world.ranks[rank].trace
            for event in sorted(trace.events, key=lambda event: event.seq):
                if step == skipped and isinstance(event, AmpUnscale):
                    event = msgspec.structs.replace(event, found_inf=True)
                unseen = OptimizerStep if step == skipped else Backward if step == blind else ()
                if not isinstance(event, unseen):
                    writer.append(moved(event, step, 0))
            for sample in waiting:
                writer.append(sample)
            waiting = [msgspec.structs.replace(sample, step=step) for sample in trace.samples if step != blind]
            if not late:
                for sample in waiting:
                    writer.append(sample)
                waiting = []
            if step % 2:
                writer.flush()
        for sample in waiting:
            writer.append(sample)
        writer.close()
    return folder


def unlike(rank: int) -> list[AnyRecord]:
    """What the parameters of the first trainers hold: the first is another one on every rank, the rest are alike."""
    values = np.concatenate([np.random.default_rng(rank if id == 0 else 100 + id).normal(size=16) for id in range(3)])
    held = ParamValues(params=(0, 1, 2), counts=(16, 16, 16), values=values.astype("<f4").tobytes())
    return [held, msgspec.structs.replace(held, after=True)]


def named(rank: int) -> list[AnyRecord]:
    return [NamedGroup(name="mesh_cp", group=(rank - rank % 2, rank - rank % 2 + 1))]


def by_hand(*factors: float) -> list[Trainer]:
    return [replace(RIGHT, hands=(Hand("before_optimizer", factor),)) for factor in factors]


def harmed(harm: Callable[..., bytes | None], seed: int | None = None) -> Callable[[Path], Path]:
    """Six steps of three ranks, of which something happened to the file of one."""

    def write(folder: Path) -> Path:
        run = write_run(folder, ranks=3, steps=6, flush_steps=True)
        file = run / "rank-00001.trace"
        data = harm(file.read_bytes(), *([] if seed is None else [random.Random(seed)]))
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        return run

    return write


RUNS: dict[str, Callable[[Path], Path]] = {
    "every step wrong": lambda folder: write_run(folder, steps=7, flush_steps=True),
    "all steps in one frame": lambda folder: write_run(folder, steps=7),
    "one step wrong": lambda folder: write_steps(folder, [RIGHT, RIGHT, WRONG, RIGHT, WRONG, RIGHT]),
    "right, sharded and clipped": lambda folder: write_steps(folder, [FSDP] * 4),
    "a pipeline": lambda folder: write_steps(folder, [PIPELINE] * 3),
    "a constant by hand": lambda folder: write_steps(folder, by_hand(1.0, 0.83172, 0.83172, 0.83172)),
    "something by hand": lambda folder: write_steps(folder, by_hand(0.83172, 0.71919, 0.90311, 0.6613)),
    "a parameter that is no copy": lambda folder: write_steps(folder, [SUMMED] * 3, tables=unlike),
    "named groups": lambda folder: write_steps(folder, [FSDP] * 3, tables=named),
    "an overflow": lambda folder: write_steps(folder, [AMP] * 5, skipped=2),
    "a step that nobody saw": lambda folder: write_steps(folder, [RIGHT] * 4, blind=2),
    "one behind a finding": lambda folder: write_steps(folder, [WRONG, RIGHT, RIGHT, RIGHT], blind=2),
    "late samples": lambda folder: write_steps(folder, [RIGHT, WRONG, RIGHT, RIGHT], late=True),
    "columns": lambda folder: one_wrong(folder),
    "columns beside a measured step": lambda folder: one_wrong(folder, samples_of=4),
    "columns behind a measured finding": lambda folder: one_wrong(folder, wrong=5, samples_of=5),
    "a rank is missing": harmed(lambda data: None),
    "a rank has no header": harmed(lambda data: b""),
    "a rank was cut off": harmed(lambda data: data[:-700]),
    **{f"bits were flipped {seed}": harmed(spoil, seed) for seed in range(4)},
    **{f"records are forged {seed}": harmed(forge, seed) for seed in range(4)},
}
"""By what they are: writes one into a folder."""

"""Writes the trace of a long run with known faults in it, as a rank writes every step without samples.

    python benchmarks/scale_trace.py FOLDER [ranks] [steps] [microbatches]

FSDP over all ranks, `microbatches` accumulation steps, one reduction a step, unequal numbers of tokens. The losses
divide by all tokens and multiply by the number of ranks, since the reduction averages. The faults, of which the first
is the first divergence: one contribution of one rank weighs 4 times as much at half of the run; in the last tenth the
losses leave the number of ranks out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from gradcheck_dist.events import (
    SCHEMA_VERSION,
    AnyEvent,
    Backward,
    Clip,
    Header,
    Loss,
    LossGradient,
    OptimizerStep,
    Param,
    ParamSet,
    Reduce,
    Site,
    StepColumns,
    StepEnd,
    StepShape,
    ZeroGrad,
)
from gradcheck_dist.trace.columns import BLOCK_STEPS, columns_of
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path

SITE = Site("train.py", 42, "train_step")
FACTOR = 4.0


@dataclass(frozen=True)
class Truth:
    """What is wrong with the run that was written."""

    rank: int
    microbatch: int
    first_step: int
    every_rank_from: int


def write(folder: Path, ranks: int, steps: int, microbatches: int) -> Truth:
    """Write the run; about 48 bytes a contribution."""
    create_run_dir(folder, {"world_size": ranks, "id": f"scale-{ranks}x{steps}x{microbatches}"})
    truth = Truth(ranks // 2, microbatches // 2, steps // 2, steps - steps // 10)
    events = one_step(ranks, microbatches)
    table = columns_of(events)
    row_of = {(type(events[index]), name, index): row for row, (index, name, _) in enumerate(table)}
    rows = {
        (kind, name): [row for (of, field, _), row in row_of.items() if (of, field) == (kind, name)]
        for kind, name, _ in row_of
    }
    total = np.zeros(steps, dtype=np.int64)
    for rank in range(ranks):
        total += tokens_of(rank, steps, microbatches).sum(axis=0)
    for rank in range(ranks):
        tokens = tokens_of(rank, steps, microbatches)
        weight = weights_of(rank, total, ranks, microbatches, truth)
        header = Header(schema_version=SCHEMA_VERSION, tool_version="bench", rank=rank, world_size=ranks, pid=1,
                        started_unix_s=0.0, objective="global-token-mean", axes={"dp_shard": ranks},
                        columns=True)  # fmt: skip
        writer = TraceWriter(trace_path(folder, rank), header, background=False)
        writer.append(Param(id=0, name="layers.0.weight", shape=(1024, 1024), dtype="float32", num_positions=96))
        writer.append(ParamSet(id=0, params=(0,)))
        writer.append(StepShape(id=0, events=msgspec.msgpack.encode(events)))
        writer.flush()
        random = np.random.default_rng(rank)
        for first in range(0, steps, BLOCK_STEPS):
            part = slice(first, min(first + BLOCK_STEPS, steps))
            count = part.stop - part.start
            numbers = random.integers(1, 2**31, (len(table), count))  # hashes, and whatever else is not judged here
            for key in ((Loss, "num_tokens"), (LossGradient, "num_tokens")):
                numbers[rows[key]] = tokens[:, part]
            numbers[rows[LossGradient, "weight"]] = weight[:, part].view(np.int64)
            numbers[rows[Loss, "value"]] = random.normal(2.0, 0.1, (microbatches, count)).view(np.int64)
            seqs = np.arange(part.start, part.stop, dtype="<i8") * len(events)
            writer.append(
                StepColumns(
                    shape=0,
                    first_step=first,
                    num_steps=count,
                    first_seqs=seqs.tobytes(),
                    numbers=memoryview(numbers.astype("<i8").tobytes()),
                )
            )
            writer.flush()
        writer.close()
    return truth


def tokens_of(rank: int, steps: int, microbatches: int) -> np.ndarray:
    """Valid tokens, shape (microbatches, steps)."""
    return np.random.default_rng(10_000 + rank).integers(500, 4096, (microbatches, steps))


def weights_of(rank: int, total: np.ndarray, ranks: int, microbatches: int, truth: Truth) -> np.ndarray:
    """Weight of a token at the loss, shape (microbatches, steps); `total` tokens of each step."""
    weight = np.broadcast_to(ranks / total, (microbatches, len(total))).copy()
    weight[:, truth.every_rank_from :] /= ranks
    if rank == truth.rank:
        weight[truth.microbatch, truth.first_step] *= FACTOR
    return weight


def one_step(ranks: int, microbatches: int) -> list[AnyEvent]:
    """The events of a step, as probes record them."""
    common = {"t_ns": 0, "step": 0, "site": SITE}
    events: list[AnyEvent] = []
    for k in range(microbatches):
        seq, slot = 3 * k, {"accumulation_step": k, "microbatch": 0}
        loss = {"loss_id": seq, "num_tokens": 0, **common}
        events += [
            Loss(seq=seq, reduction="sum", num_labels=4096, label_hash=0, value=0.0, **loss),
            LossGradient(seq=seq + 2, weight=0.0, **slot, **loss),
            Backward(seq=seq + 1, params=0, **slot, **common),
        ]
    last = 3 * microbatches
    return [
        *events,
        Reduce(seq=last, impl="fsdp", op="avg", group=tuple(range(ranks)), params=0,
               accumulation_step=microbatches - 1, **common),
        Clip(seq=last + 1, params=0, max_norm=1.0, norm_type=2.0, total_norm=0.0, coefficient=0.0, **common),
        OptimizerStep(seq=last + 2, optimizer="AdamW", params=0, lr=0.0, **common),
        ZeroGrad(seq=last + 3, params=0, **common),
        StepEnd(seq=last + 4, duration_s=0.0, probe_s=0.0, **common),
    ]  # fmt: skip


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), *map(int, [*sys.argv[2:5], *("64", "200", "64")[len(sys.argv) - 2 :]])))

"""A run folder of many ranks and steps, written in seconds: what the screens open in bench_tui.

The first step is a real one: every rank's own gradient samples, averaged where they should be summed. The later steps
are the same bytes on every rank, with their own step number.

python benchmarks/big_run.py FOLDER [RANKS] [STEPS]
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from tiny_runs import NAMES, NUM_POSITIONS, START_NS, header, tables

from gradcheck_dist.events import (
    AFTER,
    BEFORE,
    LEAF,
    AnyRecord,
    Backward,
    Clip,
    Loss,
    LossGradient,
    OptimizerStep,
    Reduce,
    RunEnd,
    Samples,
    Site,
    StepEnd,
)
from gradcheck_dist.trace.frames import MAGIC, frame
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import trace_path

EVENTS_PER_STEP = 7
TOKENS = 100

_ENCODER = msgspec.msgpack.Encoder()


def write_big_run(folder: Path, ranks: int = 1024, steps: int = 1000) -> int:
    """Write it; the number of bytes."""
    create_run_dir(folder, {"id": "big", "world_size": ranks})
    leaves = np.random.default_rng(0).normal(size=(ranks, len(NAMES), NUM_POSITIONS)).astype("<f4")
    total = leaves.sum(axis=0) / ranks / (TOKENS * ranks)
    first = leaves[0] / (TOKENS * ranks)
    later = b"".join(_frame(one_step(step, ranks, first, total)) for step in range(1, steps))
    end = _frame([RunEnd(seq=steps * EVENTS_PER_STEP + 1, t_ns=START_NS, step=steps - 1, reason="detached")])
    num_bytes = 0
    for rank in range(ranks):
        head = _frame([header(rank, ranks), *tables()])
        data = MAGIC + head + _frame(one_step(0, ranks, leaves[rank] / (TOKENS * ranks), total)) + later + end
        trace_path(folder, rank).write_bytes(data)
        num_bytes += len(data)
    return num_bytes


def _frame(records: list[AnyRecord]) -> bytes:
    return frame(_ENCODER.encode(records))


def one_step(step: int, ranks: int, leaf: np.ndarray, reduced: np.ndarray) -> list[AnyRecord]:
    """The records of one rank and step: a sum-loss of the right weight, averaged where it should be summed."""
    base, site = step * EVENTS_PER_STEP, Site("train.py", 40, "train")
    stamp = START_NS + step * 10_000_000
    common = [
        {"seq": base + i, "t_ns": stamp + i * 1_000_000, "step": step, "site": site} for i in range(EVENTS_PER_STEP)
    ]
    weight = 1.0 / (TOKENS * ranks)
    rows = [(base + 1, LEAF, leaf), (base + 3, AFTER, reduced), (base + 5, BEFORE, reduced)]
    table = [(seq, role, i, i) for seq, role, _ in rows for i in range(len(NAMES))]
    return [
        Loss(**common[0], loss_id=base, reduction="sum", num_tokens=TOKENS, value=400.0 / (1 + step)),
        Backward(**common[1], accumulation_step=0, params=0, sync=True, duration_ns=900_000),
        LossGradient(**common[2], loss_id=base, accumulation_step=0, microbatch=0, weight=weight, num_tokens=TOKENS),
        Reduce(**common[3], impl="ddp", op="avg", group=tuple(range(ranks)), params=0),
        Clip(**common[4], params=0, max_norm=1e9, norm_type=2.0, total_norm=1.0 + 1 / (1 + step), coefficient=1.0),
        OptimizerStep(**common[5], optimizer="AdamW", params=0, lr=0.001),
        StepEnd(**common[6], duration_s=0.1, probe_s=0.001),
        Samples(
            step=step,
            rows=np.array(table, dtype="<i4").tobytes(),
            dtype="float32",
            values=np.concatenate([values.ravel() for _, _, values in rows]).astype("<f4").tobytes(),
        ),
    ]


if __name__ == "__main__":
    counts = [int(text) for text in sys.argv[2:4]]
    print(f"{write_big_run(Path(sys.argv[1]), *counts) / 1e9:.2f} GB")

"""Run folders that a test writes itself: data-parallel averaging on two ranks, K accumulation steps, several steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradcheck_dist.events import (
    AFTER,
    BEFORE,
    LEAF,
    SCHEMA_VERSION,
    Backward,
    Clip,
    Event,
    Header,
    Loss,
    LossGradient,
    OptimizerStep,
    Param,
    ParamSet,
    Plan,
    ProbeStatus,
    Reduce,
    RunEnd,
    Samples,
    Site,
    StepEnd,
)
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path

SITE = Site("gradcheck_dist/errors.py", 9, "train")
SIZE = 32


def write_run(
    folder: Path,
    *,
    op: str = "avg",
    ranks: int = 2,
    accumulation: int = 3,
    steps: int = 2,
    name: str = "layer.weight",
    flush_steps: bool = False,
) -> Path:
    """A run whose losses divide by all tokens; "avg" is the fault GS101, "sum" is right.

    `flush_steps`: a frame a step, else one for all.
    """
    create_run_dir(folder, {"world_size": ranks, "id": f"small-{op}"})
    random = np.random.default_rng(0)
    tokens = random.integers(20, 60, (steps, ranks, accumulation))
    leaves = random.normal(size=(steps, ranks, accumulation, SIZE))
    for rank in range(ranks):
        _write_rank(folder, rank, tokens, leaves, op, name, flush_steps)
    return folder


def _write_rank(
    folder: Path, rank: int, tokens: np.ndarray, leaves: np.ndarray, op: str, name: str, flush_steps: bool
) -> None:
    steps, ranks, accumulation = tokens.shape
    header = Header(
        schema_version=SCHEMA_VERSION,
        tool_version="0",
        rank=rank,
        world_size=ranks,
        pid=1,
        started_unix_s=0.0,
        objective="global-token-mean",
        axes={"dp_replicate": ranks},
        sample_size=SIZE,
    )
    writer = TraceWriter(trace_path(folder, rank), header, background=False)
    writer.append(Param(id=1, name=name, shape=(SIZE,), dtype="float32", num_positions=SIZE))
    writer.append(ParamSet(id=1, params=(1,)))
    writer.append(Plan(id=1, param=1, num_values=SIZE))
    seq, at = 0, 1_700_000_000_000_000_000 + rank * 1000

    def emit(event: type[Event], **fields: object) -> int:
        nonlocal seq, at
        seq, at = seq + 1, at + 2_000_000
        writer.append(event(seq=seq, t_ns=at, **fields))  # type: ignore[arg-type, call-arg]
        return seq

    for probe in ("loss", "autograd", "ddp", "optimizer", "clip"):
        emit(ProbeStatus, step=0, probe=probe, active=True)
    group = tuple(range(ranks))
    for step in range(steps):
        weight = 1.0 / float(tokens[step].sum())
        rows, values = [], []
        total = np.zeros(SIZE)
        for k in range(accumulation):
            count = int(tokens[step, rank, k])
            told = {"step": step, "site": SITE, "loss_id": step * 100 + k, "num_tokens": count}
            emit(Loss, reduction="sum", value=3.0 * count, label_hash=hash((step, rank, k)), **told)
            emit(LossGradient, accumulation_step=k, microbatch=0, weight=weight, **told)
            number = emit(Backward, step=step, site=SITE, accumulation_step=k, params=1, duration_ns=1_500_000)
            leaf = leaves[step, rank, k] * weight
            total += leaf
            rows.append((number, LEAF, 1, 1))
            values.append(leaf)
        reduced = (leaves[step] * weight).sum((0, 1)) / (ranks if op == "avg" else 1)
        number = emit(
            Reduce, step=step, site=SITE, impl="ddp", op=op, group=group, params=1, accumulation_step=accumulation - 1
        )
        rows += [(number, BEFORE, 1, 1), (number, AFTER, 1, 1)]
        values += [total, reduced]
        norm = float(np.linalg.norm(reduced))
        emit(Clip, step=step, site=SITE, params=1, max_norm=1e9, norm_type=2.0, total_norm=norm, coefficient=1.0)
        number = emit(OptimizerStep, step=step, optimizer="AdamW", params=1, lr=1e-3)
        rows.append((number, BEFORE, 1, 1))
        values.append(reduced)
        emit(StepEnd, step=step, duration_s=0.02, probe_s=0.001)
        data = np.concatenate(values).astype("<f4").tobytes()
        writer.append(Samples(step=step, rows=np.array(rows, dtype="<i4").tobytes(), dtype="float32", values=data))
        if flush_steps:
            writer.flush()
    emit(RunEnd, step=steps)
    writer.close()

"""Small run folders, written with the TraceWriter: data-parallel accumulation, with or without a fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np

from gradcheck_dist import errors
from gradcheck_dist.events import (
    AFTER,
    BEFORE,
    LEAF,
    SCHEMA_VERSION,
    AnyRecord,
    Backward,
    Clip,
    Event,
    Exchange,
    GradWrite,
    Header,
    Loss,
    LossGradient,
    OptimizerStep,
    Param,
    ParamSet,
    Plan,
    Reduce,
    RunEnd,
    Samples,
    Site,
    StepEnd,
)
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path

START_NS = 1_700_000_000_000_000_000
NUM_POSITIONS = 32
NAMES = ("embedding.weight", "layers.0.attention.weight", "layers.0.ffn.weight", "head.weight")
SOURCE = "gradcheck_dist/errors.py"
"""The file that sites name: one that is surely there and shown."""
SOURCE_TEXT = "class GradcheckError(Exception):"
SOURCE_LINE = 1 + Path(errors.__file__).read_text().splitlines().index(SOURCE_TEXT)


def num_tokens(rank: int, k: int) -> int:
    return 40 + 10 * rank + 7 * k


def tables(names: tuple[str, ...] = NAMES) -> list[AnyRecord]:
    """Who is who: parameters, each sampled whole, and the set of them all."""
    params: list[AnyRecord] = [
        Param(id=i, name=name, shape=(NUM_POSITIONS,), dtype="float32", num_positions=NUM_POSITIONS)
        for i, name in enumerate(names)
    ]
    plans = [Plan(id=i, param=i, num_values=NUM_POSITIONS) for i in range(len(names))]
    return [*params, ParamSet(id=0, params=tuple(range(len(names)))), *plans]


def records(
    rank: int,
    *,
    world: int = 2,
    accumulation: int = 3,
    steps: int = 1,
    fault: str | None = "repeated",
    names: tuple[str, ...] = NAMES,
    end: bool = True,
    site: Site | None = None,
    exchanged: bool = False,
) -> Iterator[list[AnyRecord]]:
    """The records of one rank after its header, a list a step. Faults: "repeated" sums at every backward, "averaged"
    averages what should be summed, "unreduced" leaves each rank its own; None is healthy. `exchanged`: activations
    are summed by a function whose backward is wrong, and a line multiplies gradients by 1."""
    place = site or Site(SOURCE, SOURCE_LINE, "train")
    total = sum(num_tokens(r, k) for r in range(world) for k in range(accumulation))
    seq = 0
    for step in range(steps):
        leaves = {
            (r, k): np.random.default_rng((step, r, k)).normal(size=(len(names), NUM_POSITIONS))
            for r in range(world)
            for k in range(accumulation)
        }
        grads = {r: np.zeros((len(names), NUM_POSITIONS)) for r in range(world)}
        events: list[AnyRecord] = []
        rows: list[tuple[int, int, np.ndarray]] = []

        def common(at: Site | None = place, *, step: int = step) -> dict[str, object]:
            nonlocal seq
            seq += 1
            t_ns = START_NS + seq * 1_000_000
            return {"seq": seq, "t_ns": t_ns, "step": step, "site": at}

        for k in range(accumulation):
            last = k == accumulation - 1
            events.append(
                Loss(**common(), loss_id=seq, reduction="sum", num_tokens=num_tokens(rank, k), value=200.0 / (1 + step))
            )
            loss_id = seq
            backward = Backward(
                **common(), accumulation_step=k, params=0, sync=last or fault == "repeated", duration_ns=700_000
            )
            rows.append((seq, LEAF, leaves[rank, k] / total))
            events.append(
                LossGradient(
                    **common(),
                    loss_id=loss_id,
                    accumulation_step=k,
                    microbatch=0,
                    weight=1 / total,
                    num_tokens=num_tokens(rank, k),
                )
            )
            if exchanged:
                given = [np.arange(8) + 1.0 + r for r in range(world)]
                arrived = np.arange(8) - 3.0
                values = np.concatenate([given[rank], sum(given), arrived, arrived[::-1]]).astype("<f4").tobytes()
                told = {"function": "Reversed", "group": tuple(range(world)), "collectives": ("all_reduce",)}
                place_of = {"index": k, "accumulation_step": k, "microbatch": 0}
                counts = {"input_counts": (8,), "output_counts": (8,)}
                events.append(Exchange(**common(), **told, **place_of, **counts, values=values))
            for r in range(world):
                grads[r] = grads[r] + leaves[r, k] / total
            if fault != "unreduced" and (last or fault == "repeated"):
                op = "avg" if fault == "averaged" else "sum"
                events.append(
                    Reduce(**common(), impl="ddp", op=op, group=tuple(range(world)), params=0, accumulation_step=k)
                )
                reduced = sum(grads.values()) / (world if op == "avg" else 1)
                grads = dict.fromkeys(grads, reduced)
                rows.append((seq, AFTER, grads[rank]))
            events.append(backward)
        if exchanged:
            events.append(GradWrite(**common(), params=0, factor=1.0))
        norm = float(np.linalg.norm(grads[rank]))
        events.append(Clip(**common(), params=0, max_norm=1e9, norm_type=2.0, total_norm=norm, coefficient=1.0))
        events.append(OptimizerStep(**common(), optimizer="AdamW", params=0, lr=0.001))
        rows.append((seq, BEFORE, grads[rank]))
        events.append(StepEnd(**common(None), duration_s=0.1, probe_s=0.001))
        table = [(at, role, i, i) for at, role, _ in rows for i in range(len(names))]
        events.append(
            Samples(
                step=step,
                rows=np.array(table, dtype="<i4").tobytes(),
                dtype="float64",
                values=np.concatenate([values.ravel() for _, _, values in rows]).astype("<f8").tobytes(),
            )
        )
        if step == steps - 1 and end:
            events.append(RunEnd(**common(None), reason="detached"))
        yield [*tables(names), *events] if step == 0 else events


def header(rank: int, world: int = 2, **changes: object) -> Header:
    values: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "tool_version": "0",
        "rank": rank,
        "world_size": world,
        "pid": 1,
        "started_unix_s": START_NS / 1e9,
        "objective": "global-token-mean",
        "axes": {"dp_replicate": world},
    }
    return Header(**(values | changes))  # type: ignore[arg-type]


def write_run(
    folder: Path,
    *,
    world: int = 2,
    ranks: tuple[int, ...] | None = None,
    declared: Mapping[str, object] = MappingProxyType({}),
    **how: object,
) -> Path:
    """A run folder. `ranks`: those that leave a trace; None means all. `declared`: fields of their headers."""
    create_run_dir(folder, {"id": folder.name, "world_size": world})
    for rank in range(world) if ranks is None else ranks:
        writer = TraceWriter(trace_path(folder, rank), header(rank, world, **declared), background=False)
        for batch in records(rank, world=world, **how):  # type: ignore[arg-type]
            for record in batch:
                writer.append(record)
            writer.flush()
        writer.close()
    return folder


def write_unsummed(folder: Path) -> Path:
    """Two ranks with the same labels and a summand each of every gradient, which nobody adds up."""
    create_run_dir(folder, {"id": folder.name, "world_size": 2})
    for rank in range(2):
        writer = TraceWriter(trace_path(folder, rank), header(rank, axes={"tp": 2}), background=False)
        for batch in records(rank, fault="unreduced"):
            losses = [record.seq for record in batch if isinstance(record, Loss)]
            for record in batch:
                if isinstance(record, Loss):
                    k = losses.index(record.seq)
                    record = msgspec.structs.replace(record, label_hash=k + 1, num_tokens=num_tokens(0, k))
                elif isinstance(record, LossGradient):
                    record = msgspec.structs.replace(record, num_tokens=num_tokens(0, record.accumulation_step))
                writer.append(record)
        writer.close()
    return folder


def events_of(batch: list[AnyRecord]) -> list[Event]:
    return [record for record in batch if isinstance(record, Event)]

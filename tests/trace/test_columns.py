"""Steps in columns: what goes in comes out again, and like steps cost eight bytes a number."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gradcheck_dist.events import (
    AnyEvent,
    AnyRecord,
    Backward,
    Clip,
    Loss,
    LossGradient,
    OptimizerStep,
    Site,
    StepColumns,
    StepEnd,
    StepShape,
)
from gradcheck_dist.trace import columns
from gradcheck_dist.trace.columns import ColumnWriter, expand

SITE = Site("train.py", 3, "main")


def one_step(step: int, first: int, *, contributions: int = 2, dtype: str = "float32") -> list[AnyEvent]:
    random = np.random.default_rng(step)
    events: list[AnyEvent] = []
    for k in range(contributions):
        seq = first + 3 * k
        common = {"t_ns": 5 * step, "step": step, "site": SITE}
        count = int(random.integers(1, 99))
        events += [
            Loss(seq=seq, loss_id=seq, num_tokens=count, label_hash=int(random.integers(2**62)), value=random.normal(),
                 dtype=dtype, **common),
            LossGradient(seq=seq + 1, loss_id=seq, accumulation_step=k, microbatch=0, weight=1 / count, **common),
            Backward(seq=seq + 2, accumulation_step=k, params=0, duration_ns=step, **common),
        ]  # fmt: skip
    last = first + 3 * contributions
    common = {"t_ns": 5 * step, "step": step, "site": None}
    return [
        *events,
        Clip(seq=last, params=0, max_norm=1.0, norm_type=2.0, total_norm=float(step), coefficient=0.5, **common),
        OptimizerStep(seq=last + 1, optimizer="AdamW", params=0, lr=0.1 / (1 + step), **common),
        StepEnd(seq=last + 2, duration_s=1.5, probe_s=0.25, **common),
    ]


def read_back(records: list[AnyRecord]) -> dict[int, list[AnyEvent]]:
    encoded = msgspec.msgpack.encode(records)
    shapes, steps = {}, {}
    for record in msgspec.msgpack.decode(encoded, type=list[AnyRecord]):
        if isinstance(record, StepShape):
            shapes[record.id] = record
        elif isinstance(record, StepColumns):
            steps |= dict(expand(shapes[record.shape], record))
        else:
            steps.setdefault(record.step, []).append(record)
    return steps


def timeless(events: list[AnyEvent]) -> list[AnyEvent]:
    gone = {"duration_ns": 0}
    return [msgspec.structs.replace(event, t_ns=0, **(gone if isinstance(event, Backward) else {})) for event in events]


def test_steps_come_back_as_they_were_but_for_single_times() -> None:
    records: list[AnyRecord] = []
    writer = ColumnWriter(records.append)
    given = {}
    for step in range(150):
        # another shape every 40 steps, and a gap
        given[step + (step > 100)] = one_step(
            step + (step > 100), 1 + 20 * step, contributions=3 if step % 40 == 7 else 2
        )
    for step, events in given.items():
        writer.add(step, events)
    writer.flush()
    found = read_back(records)
    assert found.keys() == given.keys()
    for step, events in given.items():
        assert timeless(found[step]) == timeless(events)
        assert found[step][-1].t_ns == events[-1].t_ns
    assert sum(isinstance(record, StepShape) for record in records) == 2


def test_a_like_step_costs_eight_bytes_a_number() -> None:
    records: list[AnyRecord] = []
    writer = ColumnWriter(records.append)
    for step in range(640):
        writer.add(step, one_step(step, 20 * step, contributions=8))
    writer.flush()
    size = sum(len(msgspec.msgpack.encode(record)) for record in records if isinstance(record, StepColumns))
    numbers = 8 * 4 + 6  # tokens, hash, value, weight; norm, coefficient, lr, and three of StepEnd
    assert 8 * numbers * 640 < size < 9.1 * numbers * 640


def test_steps_of_too_many_kinds_are_written_as_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_SHAPES", 3)
    records: list[AnyRecord] = []
    writer = ColumnWriter(records.append)
    for step in range(6):
        writer.add(step, one_step(step, 20 * step, dtype=f"float{step}"))
    writer.flush()
    found = read_back(records)
    assert [timeless(found[step]) for step in range(6)] == [
        timeless(one_step(step, 20 * step, dtype=f"float{step}")) for step in range(6)
    ]
    assert sum(isinstance(record, StepShape) for record in records) == 3


def test_columns_that_do_not_fit_their_shape_are_refused() -> None:
    shape = StepShape(id=0, events=msgspec.msgpack.encode(one_step(0, 0)))
    with pytest.raises(ValueError, match="reshape"):
        list(
            expand(
                shape,
                StepColumns(shape=0, first_step=0, num_steps=1, first_seqs=bytes(8), numbers=memoryview(bytes(24))),
            )
        )

"""Steps in columns: a step like an earlier one is written as the numbers in which it differs. Imports no torch.

A training loop does the same thing step after step. Its events, without samples, are kept once (`StepShape`); of each
later step only tokens, weights, norms and the like are written (`StepColumns`), 8 bytes a number, so that a watch over
every step of a long run costs some 48 bytes a contribution, and is judged as arrays. Times of single events are not
kept; `expand` gives each the end of its step.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np

from gradcheck_dist.events import (
    AmpScale,
    AmpUnscale,
    AnyEvent,
    AnyRecord,
    Clip,
    Event,
    Loss,
    LossGradient,
    LossTerm,
    OptimizerStep,
    StepColumns,
    StepEnd,
    StepShape,
)
from gradcheck_dist.trace.frames import Encoder

CHANGING: tuple[tuple[type[Event], str, str], ...] = (
    (Loss, "num_tokens", "<i8"),
    (Loss, "num_labels", "<i8"),
    (Loss, "label_hash", "<i8"),
    (Loss, "value", "<f8"),
    (LossGradient, "weight", "<f8"),
    (LossGradient, "weight_min", "<f8"),
    (LossGradient, "weight_max", "<f8"),
    (LossGradient, "num_tokens", "<i8"),
    (AmpUnscale, "scale", "<f8"),
    (Clip, "total_norm", "<f8"),
    (Clip, "coefficient", "<f8"),
    (OptimizerStep, "lr", "<f8"),
    (StepEnd, "t_ns", "<i8"),
    (StepEnd, "duration_s", "<f8"),
    (StepEnd, "probe_s", "<f8"),
    (Loss, "num_weighted_tokens", "<f8"),
    (LossTerm, "weight", "<f8"),
    (LossGradient, "label_share", "<f8"),
    (AmpScale, "scale", "<f8"),
    (LossGradient, "hooks_factor", "<f8"),
    (LossTerm, "hooks_factor", "<f8"),
    (LossGradient, "num_reduced", "<i8"),
    (LossGradient, "num_rows", "<i8"),
    (LossGradient, "reduced_weight", "<f8"),
)
"""Fields that differ from step to step, in the order of the columns; each has a column for every event of its kind in
which it is not None. The file format: append only."""

MAX_SHAPES = 64
"""A rank whose steps differ in more ways than this writes the others as plain events."""
_FORMAT = {"<i8": "q", "<f8": "d"}
BLOCK_STEPS, BLOCK_BYTES = 64, 64 << 10


_DECODER = msgspec.msgpack.Decoder(list[AnyEvent])


def events_of(shape: StepShape) -> list[AnyEvent]:
    """The events of a shape.

    Raises:
        msgspec.MsgspecError: these are no events.
    """
    return _DECODER.decode(shape.events)


def columns_of(events: list[AnyEvent]) -> list[tuple[int, str, str]]:
    """The columns of a shape, as (index of the event, field, dtype)."""
    return [
        (index, name, dtype)
        for kind, name, dtype in CHANGING
        for index, event in enumerate(events)
        if type(event) is kind and getattr(event, name) is not None
    ]


def find_columns(events: list[AnyEvent], kind: type[Event], name: str) -> dict[int, int]:
    """Where a field's columns lie: index of the event -> row of `numbers`."""
    table = enumerate(columns_of(events))
    return {index: row for row, (index, field_name, _) in table if field_name == name and type(events[index]) is kind}


@dataclass
class _Open:
    """Steps of one shape that are not written yet."""

    shape: int
    first_step: int
    first_seqs: list[int] = field(default_factory=list)
    numbers: list[bytes] = field(default_factory=list)


class _Shape:
    """A shape that was written: where a step's numbers are, and how they are packed."""

    def __init__(self, id: int, events: list[AnyEvent]) -> None:
        table = columns_of(events)
        self.id = id
        self.columns = [(index, name) for index, name, _ in table]
        self.packer = struct.Struct("<" + "".join(_FORMAT[dtype] for _, _, dtype in table))


class ColumnWriter:
    """Takes whole steps and hands on records: a shape when it is new, columns when enough have come together."""

    def __init__(self, write: Callable[[AnyRecord], None], max_shapes: int | None = None) -> None:
        self._write, self._max_shapes = write, MAX_SHAPES if max_shapes is None else max_shapes
        self._shapes: dict[bytes, _Shape] = {}
        self._open: _Open | None = None
        self._encoder = Encoder()

    def add(self, step: int, events: list[AnyEvent]) -> None:
        """One step, its events in order of seq."""
        first = events[0].seq
        key = self._encoder.encode([_what_stays(event, first) for event in events])
        known = self._shapes.get(key)
        if known is None:
            if len(self._shapes) >= self._max_shapes:
                self.flush()
                for event in events:
                    self._write(event)
                return
            known = self._shapes[key] = _Shape(len(self._shapes), events)
            template = self._encoder.encode([_template(event, first) for event in events])
            self._write(StepShape(id=known.id, events=template))
        shape = known.id
        numbers = known.packer.pack(*[getattr(events[index], name) for index, name in known.columns])
        block = self._open
        if block is None or block.shape != shape or block.first_step + len(block.numbers) != step:
            self.flush()
            block = self._open = _Open(shape, step)
        block.first_seqs.append(first)
        block.numbers.append(numbers)
        if len(block.numbers) >= BLOCK_STEPS or len(block.numbers) * len(numbers) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand over what has come together so far."""
        block, self._open = self._open, None
        if block is not None:
            rows = np.frombuffer(b"".join(block.numbers), dtype="<i8").reshape(len(block.numbers), -1)
            self._write(
                StepColumns(
                    shape=block.shape,
                    first_step=block.first_step,
                    num_steps=len(block.numbers),
                    first_seqs=np.array(block.first_seqs, dtype="<i8").tobytes(),
                    numbers=memoryview(rows.T.tobytes()),
                )
            )


class _Fields:
    """What of events of one kind is the same in steps of one shape, and what changes, each behind its seq."""

    def __init__(self, kind: type[Event]) -> None:
        changing = [name for other, name, _ in CHANGING if other is kind]
        apart = {"seq", "step", "t_ns", "duration_ns", "loss_id", *changing}
        self.fixed = attrgetter("seq", *(name for name in kind.__struct_fields__ if name not in apart))
        self.changing = attrgetter("seq", *changing) if changing else None


_fields = functools.cache(_Fields)


def _what_stays(event: AnyEvent, first: int) -> list[object]:
    """What tells shapes apart, for every step: what `_template` keeps, without making an event of it."""
    kind = type(event)
    fields = _fields(kind)
    seq, *fixed = fields.fixed(event)
    stays = [kind.__name__, seq - first, *fixed]
    if fields.changing is not None:
        stays += [value is None for value in fields.changing(event)]
    if isinstance(event, Loss | LossGradient):
        stays.append(event.loss_id - first)
    return stays


def _template(event: AnyEvent, first: int) -> AnyEvent:
    """The event without what changes from step to step; what is None stays None."""
    changes: dict[str, object] = {"seq": event.seq - first, "step": 0, "t_ns": 0}
    if isinstance(event, Loss | LossGradient):
        changes["loss_id"] = event.loss_id - first
    for kind, name, _ in CHANGING:
        if type(event) is kind and getattr(event, name) is not None:
            changes[name] = 0
    if hasattr(event, "duration_ns"):
        changes["duration_ns"] = 0
    return msgspec.structs.replace(event, **changes)


def clips(shapes: Mapping[int, StepShape], columns: Iterable[StepColumns]) -> Iterator[tuple[int, Clip]]:
    """The clips of steps in columns, as (step, clip); blocks that do not fit their shape are left out."""
    for block in columns:
        template = events_of(shapes[block.shape]) if block.shape in shapes else []
        rows = {name: find_columns(template, Clip, name) for name in ("total_norm", "coefficient")}
        count = len(columns_of(template))
        if not rows["total_norm"] or len(block.numbers) != 8 * count * block.num_steps:
            continue
        numbers = np.frombuffer(block.numbers, dtype="<f8").reshape(count, block.num_steps)
        for offset in range(block.num_steps):
            for index, row in rows["total_norm"].items():
                norm, factor = numbers[row, offset], numbers[rows["coefficient"][index], offset]
                clip = msgspec.structs.replace(template[index], total_norm=float(norm), coefficient=float(factor))
                assert isinstance(clip, Clip)
                yield block.first_step + offset, clip


def expand(shape: StepShape, columns: StepColumns, *, only: int | None = None) -> Iterator[tuple[int, list[AnyEvent]]]:
    """The steps with their events again, all but the times of single events; `only` one of them if it is there.

    Raises:
        ValueError: the columns do not fit the shape, or this is none.
    """
    template = events_of(shape)
    table = columns_of(template)
    numbers = np.frombuffer(columns.numbers, dtype="<i8").reshape(len(table), columns.num_steps)
    first_seqs = np.frombuffer(columns.first_seqs, dtype="<i8")
    values = [numbers[row].view(dtype).tolist() for row, (_, _, dtype) in enumerate(table)]
    for offset, first in enumerate(first_seqs.tolist()):
        if only is not None and columns.first_step + offset != only:
            continue
        changes: list[dict[str, object]] = [
            {"seq": event.seq + first, "step": columns.first_step + offset} for event in template
        ]
        for (index, name, _), column in zip(table, values, strict=True):
            changes[index][name] = column[offset]
        ended = next((of["t_ns"] for of in changes if "t_ns" in of), 0)
        for event, of in zip(template, changes, strict=True):
            of.setdefault("t_ns", ended)
            if isinstance(event, Loss | LossGradient):
                of["loss_id"] = event.loss_id + first
        pairs = zip(template, changes, strict=True)
        yield columns.first_step + offset, [msgspec.structs.replace(event, **of) for event, of in pairs]

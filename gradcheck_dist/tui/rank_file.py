"""One rank's trace as a screen needs it: a light pass over all frames, whole records of the chosen steps only.

What is kept of a frame is where it lies and which steps it holds: a run of gigabytes is looked at in megabytes.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Collection
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import (
    AnyRecord,
    Backward,
    Clip,
    Event,
    GradientCheck,
    Loss,
    LossGradient,
    Norms,
    NotChecked,
    OptimizerStep,
    ProbeError,
    ProbeStatus,
    Record,
    Reduce,
    RunEnd,
    Samples,
    StepColumns,
    StepEnd,
    Unrecorded,
)
from gradcheck_dist.trace.checks import Checks
from gradcheck_dist.trace.columns import expand
from gradcheck_dist.trace.frames import MAGIC, Damage, iter_frames
from gradcheck_dist.trace.reader import UNDECODABLE, RankTrace, no_header, no_trace, read_header

CHUNK_BYTES = 1 << 20
LONG_BYTES = 1 << 18
"""Of a longer file the end is looked at first."""
TAIL_BYTES = 1 << 16

_WHOLE = msgspec.msgpack.Decoder(list[AnyRecord])
_FIELDS: dict[type[Record], tuple[str, ...]] = {
    Loss: ("value", "num_tokens", "reduction", "requires_grad", "term"),
    Clip: ("total_norm", "coefficient", "partial"),
    Reduce: ("group", "params"),
}
_RAW = ("group",)
"""Left as bytes: a thousand ranks are a thousand numbers in every reduction."""
"""What the light pass reads of an event beside its step."""


def _light(kind: type[Record]) -> type[Record]:
    """A record of the same tag with few of its fields, out of the garbage collector's way."""
    wanted = ("step", *_FIELDS.get(kind, ()))
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        if field.name in wanted:
            type_ = msgspec.Raw if field.name in _RAW else field.type
            fields.append((field.name, type_) if field.required else (field.name, type_, field.default))
    tag = kind.__struct_config__.tag
    made: Any = msgspec.defstruct(f"Light{kind.__name__}", fields, tag_field="kind", tag=tag, kw_only=True, gc=False)
    return made  # type: ignore[no-any-return]


_KEPT = (ProbeStatus, ProbeError, GradientCheck, NotChecked, RunEnd, Unrecorded)
"""Few, and said of the whole run: kept whole."""
LIGHT: dict[type[Record], type[Record]] = {
    kind: kind if kind in _KEPT or not issubclass(kind, Event | Samples | Norms) else _light(kind)
    for kind in get_args(AnyRecord)
}
"""What the light pass makes of each kind of record."""
_LIGHT: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[reduce(or_, LIGHT.values())])  # type: ignore[misc]
LOSS, CLIP, REDUCE, BACKWARD, STEP_END = (LIGHT[kind] for kind in (Loss, Clip, Reduce, Backward, StepEnd))
LOSS_GRADIENT, OPTIMIZER_STEP = LIGHT[LossGradient], LIGHT[OptimizerStep]
_DATA = (LIGHT[Samples], LIGHT[Norms])


TakeColumns = Callable[[RankTrace, StepColumns], int]


class RankFile:
    """Where the frames of one rank's trace lie, its tables, and what the light pass counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace: RankTrace | None = None
        self.size = -1
        self.written_s = 0.0
        self.num_events = 0
        self.last_step: int | None = None
        self.ended = False
        self.problem = ""
        self.at_end = False
        self._offset = 0
        self._offsets, self._lengths = array("q"), array("q")
        self._first, self._last = array("q"), array("q")
        self._reduced: set[tuple[int, int]] = set()
        self._columns: TakeColumns | None = None
        self._checks = Checks()

    @property
    def begun(self) -> bool:
        """Whether anything of it was read."""
        return self._offset > 0

    @property
    def behind(self) -> int:
        """Bytes behind the last whole frame that was read."""
        return 0 if self.problem else max(0, self.size - self._offset)

    @property
    def waiting(self) -> int:
        """Bytes that the light pass has not come to."""
        return 0 if self.at_end else self.behind

    @property
    def cut(self) -> str:
        """In words, that the file ends inside a frame, or is being written; empty when it does not."""
        if not self.at_end or not self.behind:
            return ""
        return f"cut inside a frame, its last {self.behind} bytes cannot be read"

    def look(self) -> bool:
        """Whether the file grew since the last look. At the first one of a long file its end is read ahead."""
        try:
            status = self.path.stat()
            if status.st_size == self.size or self.problem:
                return False
            first, self.size, self.written_s = self.size < 0, status.st_size, status.st_mtime
            self.at_end = False
            if first and self.size > LONG_BYTES + TAIL_BYTES:
                self._peek()
        except OSError as error:
            self.problem = str(error)
        return True

    def _peek(self) -> None:
        """The state of a long file stands at its end."""
        with open(self.path, "rb") as file:
            file.seek(self.size - TAIL_BYTES)
            data = file.read()
        for piece, _ in iter_frames(data):
            if not isinstance(piece, Damage):
                for record in _decoded(_LIGHT, piece):
                    if isinstance(record, RunEnd):
                        self.ended = True
                    else:
                        self.last_step = max(getattr(record, "step", 0), self.last_step or 0)

    def scan(self, take: Callable[[Any], None], limit: int = CHUNK_BYTES, columns: TakeColumns | None = None) -> bool:
        """Read on by about `limit` bytes, giving every event in its light form to `take` and steps in columns to
        `columns`, which answers how many events they are; False at the file's end."""
        self._columns = columns
        try:
            while True:
                with open(self.path, "rb") as file:
                    file.seek(self._offset)
                    data = file.read(limit)
                self.at_end = len(data) < limit
                if self._scan(data, take) or self.at_end:
                    return not self.at_end
                limit *= 4  # one frame, or one damaged stretch, is longer than this
        except (GradcheckError, OSError) as error:
            self.problem = str(error)
            return False

    def _scan(self, data: bytes, take: Callable[[Any], None]) -> bool:
        base, consumed = self._offset, 0
        if base == 0:
            if data[: len(MAGIC)] != MAGIC[: len(data)]:
                raise no_trace(self.path, data)
            if len(data) < len(MAGIC):
                return False
            consumed = len(MAGIC)
        for piece, behind in iter_frames(data, consumed, more=not self.at_end):
            if isinstance(piece, Damage):
                if behind == len(data):
                    break  # cut here, or still being written
                self._damage(Damage(base + piece.offset, piece.num_bytes, piece.reason))
            else:
                self._take(piece, base + behind - len(piece), take)
            consumed = behind
        self._offset = base + consumed
        if self.trace is not None:
            self.trace.num_bytes = self._offset
        return consumed > 0

    def _damage(self, damage: Damage) -> None:
        if self.trace is None:
            raise no_header(self.path, damage)
        self.trace.damage.append(damage)

    def _take(self, payload: memoryview, at: int, take: Callable[[Any], None]) -> None:
        try:
            if self.trace is None:
                self.trace = RankTrace(self.path, read_header(self.path, payload))
            records = _LIGHT.decode(payload)
        except UNDECODABLE as error:
            self._damage(Damage(at, len(payload), f"records cannot be decoded: {error}"))
            return
        steps: set[int] = set()
        tables = []
        for record in self._checks.of_one_trace(records, lambda words: self._damage(Damage(at, len(payload), words))):
            step = getattr(record, "step", None)
            if step is None:
                if type(record) is StepColumns:
                    steps.update(self._take_columns(self.trace, record))
                else:
                    self.trace.add(
                        self._checks.sort([record], lambda words: self._damage(Damage(at, len(payload), words)))
                    )
                continue
            kind: Any = type(record)
            if kind in _KEPT:
                tables.append(record)
            elif kind is REDUCE and (record.params, size := _length(record.group)) not in self._reduced:
                # Which parameters are ever reduced is a question to the whole run: one event of each set stays.
                self._reduced.add((record.params, size))
                tables += _like(payload, record.params, size)
            if kind not in _DATA:
                self.num_events += 1
                take(record)
            if kind is not RunEnd and kind is not Unrecorded:  # written in a step that may not have been recorded
                steps.add(step)
        self.trace.add(tables)
        self.ended = self.ended or any(isinstance(record, RunEnd) for record in tables)
        if steps:
            self.last_step = max(max(steps), self.last_step or 0)
            self._lengths.append(len(payload))
            self._first.append(min(steps))
            self._last.append(max(steps))
            self._offsets.append(at)  # the last of the four: another thread counts by it

    def _take_columns(self, trace: RankTrace, columns: StepColumns) -> tuple[int, ...]:
        """Steps without samples: not kept, but counted, compared and put on the charts. The first and the last."""
        if self._columns is None:
            return ()
        try:
            self.num_events += self._columns(trace, columns)
        except ValueError as error:
            self._damage(Damage(self._offset, len(columns.numbers), f"steps in columns cannot be read: {error}"))
            return ()
        return columns.first_step, columns.first_step + columns.num_steps - 1

    def load(self, steps: Collection[int], *, expanded: bool = True) -> RankTrace | None:
        """What was recorded of these steps, with all tables; the light pass must have come by. `expanded`: also the
        events of steps in columns."""
        if self.trace is None:
            return None
        known = self.trace
        trace = RankTrace(known.path, known.header)
        trace.params, trace.param_sets = dict(known.params), dict(known.param_sets)
        trace.plans, trace.wrappers = dict(known.plans), dict(known.wrappers)
        trace.param_values, trace.exchanges = dict(known.param_values), dict(known.exchanges)
        trace.damage = list(known.damage)
        wanted = set(steps)
        trace.events = [event for event in list(known.events) if event.step not in wanted or type(event) in _KEPT]
        with open(self.path, "rb") as file:
            for at, length in self._frames(wanted):
                file.seek(at)
                note = _noter(trace, at, length)
                found = self._checks.sort(_decoded(_WHOLE, file.read(length)), note)
                trace.add([one for one in found if getattr(one, "step", None) in wanted and type(one) not in _KEPT])
                self._add_columns(trace, [one for one in found if type(one) is StepColumns], wanted, expanded)
                trace.num_bytes += length
        return trace

    def _add_columns(self, trace: RankTrace, found: list[StepColumns], wanted: set[int], expanded: bool) -> None:
        """Wanted steps that stand in columns; damage has been noted by the light pass."""
        shapes = self.trace.shapes if self.trace is not None else {}
        for columns in found:
            steps = [step for step in wanted if columns.first_step <= step < columns.first_step + columns.num_steps]
            shape = shapes.get(columns.shape)
            if not steps or shape is None:
                continue
            trace.columns.append(columns)
            trace.shapes[columns.shape] = shape
            with contextlib.suppress(ValueError, msgspec.MsgspecError):
                for step in steps if expanded else ():
                    trace.add([event for _, events in expand(shape, columns, only=step) for event in events])

    def _frames(self, wanted: set[int]) -> list[tuple[int, int]]:
        """Where the frames lie that hold a wanted step. Copies: the arrays may grow meanwhile."""
        if not wanted or not self._offsets:
            return []
        count = len(self._offsets)
        first, last = np.array(self._first)[:count], np.array(self._last)[:count]
        hit = np.zeros(count, dtype=bool)
        for step in wanted:
            hit |= (first <= step) & (step <= last)
        where = np.flatnonzero(hit)
        return list(zip(np.array(self._offsets)[where].tolist(), np.array(self._lengths)[where].tolist(), strict=True))


def _noter(trace: RankTrace, at: int, length: int) -> Callable[[str], None]:
    return lambda words: trace.damage.append(Damage(at, length, words))


def _decoded(decoder: msgspec.msgpack.Decoder[list[Any]], payload: memoryview | bytes) -> list[Any]:
    """The records; none when they cannot be decoded, which the light pass has noted."""
    try:
        return decoder.decode(payload)
    except UNDECODABLE:
        return []


def _length(raw: msgspec.Raw) -> int:
    """The number of elements of a msgpack array, from its head."""
    head = bytes(memoryview(raw)[:5])
    if head[0] & 0xF0 == 0x90:
        return head[0] & 0x0F
    return int.from_bytes(head[1:3] if head[0] == 0xDC else head[1:5], "big")


def _like(payload: memoryview, params: int, size: int) -> list[Reduce]:
    """The reduction in whole that was read in its light form."""
    of_kind = [one for one in _decoded(_WHOLE, payload) if isinstance(one, Reduce)]
    return [one for one in of_kind if one.params == params and len(one.group) == size][:1]

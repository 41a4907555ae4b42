"""The reading end: one rank's trace file, whole or as far as it goes, and the live tail of a growing one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import (
    SCHEMA_VERSION,
    AnyRecord,
    Event,
    Header,
    NamedGroup,
    Norms,
    Param,
    ParamSet,
    ParamValues,
    Plan,
    Samples,
    StepColumns,
    StepShape,
    Wrapper,
)
from gradcheck_dist.trace.checks import Checks, header_problem
from gradcheck_dist.trace.frames import MAGIC, Damage, iter_frames
from gradcheck_dist.trace.store import Place, Where, open_file, place_of

_DECODER = msgspec.msgpack.Decoder(list[AnyRecord])
decode_records = _DECODER.decode
"""The records in a frame's payload."""
_RAW_DECODER = msgspec.msgpack.Decoder()
_TRACE_NAME = re.compile(r"rank-(\d{5,})(?:\.(\d+))?\.trace")
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""What a decoder raises on bytes that are no records though their checksum holds."""


@dataclass
class RankTrace:
    """What one rank recorded. `damage` names every stretch of the file that could not be read."""

    path: Place
    header: Header
    params: dict[int, Param] = field(default_factory=dict)
    param_sets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    param_values: dict[tuple[int, bool], np.ndarray] = field(default_factory=dict)
    """By (parameter id, after): float32, shape (count,)."""
    exchanges: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """By parameter id: ParamValues.exchanges and exchanged_with, where there were any."""
    plans: dict[int, Plan] = field(default_factory=dict)
    wrappers: dict[int, Wrapper] = field(default_factory=dict)
    named_groups: dict[tuple[str, tuple[int, ...]], NamedGroup] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    samples: list[Samples] = field(default_factory=list)
    norms: list[Norms] = field(default_factory=list)
    shapes: dict[int, StepShape] = field(default_factory=dict)
    columns: list[StepColumns] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def rank(self) -> int:
        return self.header.rank

    def add(self, records: list[AnyRecord]) -> None:
        for record in records:
            if isinstance(record, Event):
                self.events.append(record)
            elif isinstance(record, Samples):
                self.samples.append(record)
            elif isinstance(record, Norms):
                self.norms.append(record)
            elif isinstance(record, Param):
                self.params[record.id] = record
            elif isinstance(record, ParamValues):
                self._keep_values(record)
            elif isinstance(record, ParamSet):
                self.param_sets[record.id] = record.params
            elif isinstance(record, Plan):
                self.plans[record.id] = record
            elif isinstance(record, Wrapper):
                self.wrappers[record.id] = record
            elif isinstance(record, NamedGroup):
                self.named_groups[record.name, record.group] = record
            elif isinstance(record, StepShape):
                self.shapes[record.id] = record
            elif isinstance(record, StepColumns):
                self.columns.append(record)

    def _keep_values(self, record: ParamValues) -> None:
        values = np.frombuffer(record.values, dtype="<f4")
        ends = np.cumsum(record.counts)
        for param, end, count in zip(record.params, ends, record.counts, strict=True):
            self.param_values[param, record.after] = values[end - count : end]
        self.exchanges.update(
            {
                param: (count, record.exchanged_with)
                for param, count in zip(record.params, record.exchanges, strict=False)
            }
        )

    @property
    def tables(self) -> tuple[dict[Any, Any], ...]:
        """What events refer to."""
        return (
            self.params, self.param_sets, self.plans, self.wrappers, self.named_groups, self.param_values,
            self.exchanges,
        )  # fmt: skip

    def part(self, records: list[AnyRecord]) -> RankTrace:
        """The same rank and tables with these records only."""
        part = replace(self, events=[], samples=[], norms=[], columns=[], damage=list(self.damage))
        part.add(records)
        return part


def decode_values(dtype: str, values: bytes) -> np.ndarray:
    """Sample bytes as float64, shape (num_values,). bfloat16 is the upper half of a float32.

    Raises:
        GradcheckError: E506 another dtype than a Samples may have, or bytes that are no whole number of them.
    """
    try:
        if dtype == "bfloat16":
            widened = np.frombuffer(values, dtype="<u2").astype(np.uint32) << 16
            return widened.view(np.float32).astype(np.float64)
        return np.frombuffer(values, dtype=np.dtype(dtype).newbyteorder("<")).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise GradcheckError(
            f"{len(values)} bytes of samples in dtype {dtype!r} cannot be read: {error}. Legal dtypes are float32, "
            "float64, float16 and bfloat16; was this trace written by gradcheck? Record the run again.",
            code="E506",
        ) from error


class TraceTail:
    """Reads a trace as it grows: each `poll()` adds what was written since the last one to `trace`.

    A frame that is not whole yet is waited for; damage in the middle is skipped and named. `trace` is None until the
    header has arrived.

    Raises:
        GradcheckError: the file is no trace (E501), or of another schema version (E502).
    """

    def __init__(self, path: Where) -> None:
        self.path = place_of(path)
        self.trace: RankTrace | None = None
        self.at_end = False
        self._offset = 0
        self._file = open_file(self.path)
        self._checks = Checks()
        self._step = 0  # of the last record that belongs to one

    @property
    def offset(self) -> int:
        """Bytes of the file that have been read and understood, or named as damage."""
        return self._offset

    def expect(self, num_bytes: int) -> None:
        """Where the file is far away, have its next bytes sent before they are asked for."""
        self._file.expect(num_bytes)

    def poll(self, *, final: bool = False, limit: int | None = None) -> int:
        """Read on; returns the number of new records.

        Args:
            final: what is incomplete at the end of the file counts as damage.
            limit: bytes to read, more only where a single frame is longer; None reads all there is.
        """
        data = self._file.read(self._offset, limit)
        self.at_end = limit is None or len(data) < limit
        before = self._offset
        count = self._parse(data, final=final and self.at_end)
        if limit is not None and not self.at_end and self._offset == before:
            return self.poll(final=final, limit=2 * limit)
        return count

    def _parse(self, data: bytes, *, final: bool) -> int:
        start = 0
        if self._offset == 0:
            if data[: len(MAGIC)] != MAGIC[: len(data)] or (final and len(data) < len(MAGIC)):
                raise no_trace(self.path, data)
            if len(data) < len(MAGIC):
                return 0
            start = len(MAGIC)
        base, count, consumed = self._offset, 0, start
        for piece, behind in iter_frames(data, start, more=not self.at_end):
            if isinstance(piece, Damage):
                if behind == len(data) and not final:
                    break
                self._note_damage(Damage(base + piece.offset, piece.num_bytes, piece.reason))
            else:
                count += self._take(piece, base + consumed)
            consumed = behind
        self._offset = base + consumed
        if self.trace is not None:
            self.trace.num_bytes = self._offset
        return count

    def _note_damage(self, damage: Damage) -> None:
        if self.trace is None:
            raise no_header(self.path, damage)
        self.trace.damage.append(replace(damage, since=self._step))

    def _take(self, payload: memoryview, offset: int) -> int:
        if self.trace is None:
            self.trace = RankTrace(self.path, read_header(self.path, payload))
        try:
            records = decode_records(payload)
        except UNDECODABLE as error:
            self._note_damage(Damage(offset, len(payload), f"records cannot be decoded: {error}"))
            return 0

        def note(words: str) -> None:
            self._note_damage(Damage(offset, len(payload), words))

        records = self._checks.of_one_trace(records, note)
        sound = self._checks.sort(records, note)
        steps = (step for record in reversed(records) if (step := getattr(record, "step", None)) is not None)
        self._step = next(steps, self._step)
        self._receive(self.trace, sound)
        return len(sound)

    def _receive(self, trace: RankTrace, records: list[AnyRecord]) -> None:
        """What becomes of decoded records; a reader that keeps less of them overrides this."""
        trace.add(records)


def no_trace(path: Place, data: bytes) -> GradcheckError:
    """E501: a file that does not begin like a trace."""
    if not data:
        return GradcheckError(
            f"{path} is empty: its rank ended before it wrote anything, there was no space, or a copy was cut off. "
            "Copy it again, or record again.",
            code="E501",
        )
    return GradcheckError(
        f"{path} is not a gradcheck trace: it begins with {data[:8]!r}, not {MAGIC!r}. "
        "Name a run folder written by `gradcheck run` or `gradcheck scenario --keep`.",
        code="E501",
    )


def no_header(path: Place, damage: Damage) -> GradcheckError:
    """E503: a trace whose first frame is damaged."""
    return GradcheckError(
        f"{path}: the header cannot be read ({damage}). Without it nothing in this file can be judged; "
        "leave the file out or record the run again.",
        code="E503",
    )


def read_header(path: Place, payload: memoryview) -> Header:
    """The header in the first frame of a trace.

    Raises:
        GradcheckError: E502 another schema version, E503 the header cannot be decoded, or is another rank's than the
            file's name says.
    """
    try:
        first = _RAW_DECODER.decode(payload)
    except UNDECODABLE as error:
        raise no_header(path, Damage(len(MAGIC), len(payload), f"it cannot be decoded: {error}")) from error
    header = first[0] if isinstance(first, list) and first else None
    version = header.get("schema_version") if isinstance(header, dict) else None
    if version != SCHEMA_VERSION:
        raise GradcheckError(
            f"{path} has trace schema version {version!r}; this gradcheck reads version {SCHEMA_VERSION}. "
            "Judge it with the gradcheck that recorded it, or record the run again.",
            code="E502",
        )
    try:
        found = msgspec.convert(header, Header)
    except UNDECODABLE as error:
        raise no_header(path, Damage(len(MAGIC), len(payload), f"it cannot be decoded: {error}")) from error
    problem = header_problem(found)
    if problem:
        raise no_header(path, Damage(len(MAGIC), len(payload), problem))
    named = rank_and_restart(path.name)
    if named and named[0] != found.rank:
        raise GradcheckError(
            f"{path} is what rank {found.rank} recorded, under another rank's name. Copy each rank's file again, "
            "without renaming it.",
            code="E503",
        )
    return found


def rank_and_restart(name: str) -> tuple[int, int] | None:
    """Whose trace a file of this name is, as writer.trace_path gives it; None for any other name."""
    match = _TRACE_NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


class _EventsTail(TraceTail):
    """Keeps all but samples and norms, which are nearly all of a file."""

    def _receive(self, trace: RankTrace, records: list[AnyRecord]) -> None:
        trace.add([record for record in records if not isinstance(record, Samples | Norms)])


def read_trace(path: Where, *, samples: bool = True) -> RankTrace:
    """Read one rank's trace file as far as it goes; without `samples` its events only.

    Raises:
        GradcheckError: E501 no trace, E502 other schema version, E503 the header itself is damaged or missing.
    """
    tail = TraceTail(path) if samples else _EventsTail(path)
    tail.poll(final=True)
    if tail.trace is None:
        raise GradcheckError(
            f"{path} holds no header: the rank died before it wrote anything. Leave the file out or record again.",
            code="E503",
        )
    return tail.trace

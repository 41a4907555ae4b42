"""Steps that were recorded event by event, put into columns as they are read: compared as documented.

For runs of so many ranks that measuring their samples takes minutes a step. What an event says by its documentation is
then all that is looked at.
"""

from __future__ import annotations

import struct

from gradcheck_dist.events import AnyEvent, AnyRecord, Samples, StepColumns, StepEnd, StepShape
from gradcheck_dist.stream.summaries import Block, BlockReader, KnownShapes
from gradcheck_dist.trace.columns import ColumnWriter
from gradcheck_dist.trace.frames import Damage
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.store import Place

MAX_OPEN = 16
"""Steps that wait for their end; a step that never ends was cut off, or is skipped."""
PLAIN_SHAPES = 1 << 24
"""Shapes written here are told from the file's own by numbers beyond these."""


class PlainReader(BlockReader):
    """A BlockReader that also makes blocks of plain events."""

    def __init__(self, path: Place, known: KnownShapes | None = None) -> None:
        super().__init__(path, known)
        self._steps: dict[int, list[AnyEvent]] = {}
        self._made: list[AnyRecord] = []
        self._columns = ColumnWriter(self._made.append)

    def _take_other(self, trace: RankTrace, record: Samples | AnyEvent) -> None:  # type: ignore[override]
        if isinstance(record, Samples):
            return
        self._steps.setdefault(record.step, []).append(record)
        if isinstance(record, StepEnd):
            events = sorted(self._steps.pop(record.step), key=lambda event: event.seq)
            try:
                self._columns.add(record.step, events)
            except struct.error as error:
                self._note_damage(Damage(self.offset, 0, f"step {record.step} holds a number that is none: {error}"))
            self._take_made(trace)
        while len(self._steps) > MAX_OPEN:
            self._steps.pop(min(self._steps))

    def _take_made(self, trace: RankTrace) -> None:
        for record in self._made:
            if isinstance(record, StepShape):
                record.id += PLAIN_SHAPES
                trace.add([record])
            elif isinstance(record, StepColumns):
                record.shape += PLAIN_SHAPES
                self._take_columns(trace, record)
        self._made.clear()

    def _handed_out(self) -> list[Block]:
        self._columns.flush()
        if self.trace is not None:
            self._take_made(self.trace)
        return super()._handed_out()

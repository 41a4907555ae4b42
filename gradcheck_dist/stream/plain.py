"""Steps that were recorded event by event, put into columns as they are read: compared as documented.

For runs of so many ranks that measuring their samples takes minutes a step. What an event says by its documentation is
then all that is looked at.
"""

from __future__ import annotations

import struct

from gradcheck_dist.events import (
    AmpUnscale,
    AnyEvent,
    AnyRecord,
    Backward,
    Clip,
    ClipValue,
    Loss,
    LossGradient,
    OptimizerStep,
    PipelineStep,
    ProbeError,
    Reduce,
    Samples,
    ScaleGrads,
    StepColumns,
    StepEnd,
    StepShape,
    ZeroGrad,
)
from gradcheck_dist.stream.cursor import is_sampled
from gradcheck_dist.stream.summaries import Block, BlockReader, KnownShapes
from gradcheck_dist.trace.columns import ColumnWriter
from gradcheck_dist.trace.frames import Damage
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.store import Place

_Documented = (
    Loss | LossGradient | Backward | Reduce | ScaleGrads | AmpUnscale | ZeroGrad | OptimizerStep | PipelineStep
    | Clip | ClipValue | ProbeError | StepEnd
)  # fmt: skip
"""What documentation is about (documented.py). Values and checksums of others would make a shape of every step."""

MAX_OPEN = 16
"""Steps that wait for their end; a step that never ends was cut off, or is skipped."""
PLAIN_SHAPES = 1 << 24
"""Shapes written here are told from the file's own by numbers beyond these."""
MAX_PLAIN_SHAPES = 4096


class PlainReader(BlockReader):
    """A BlockReader that also makes blocks of plain events."""

    def __init__(self, path: Place, known: KnownShapes | None = None) -> None:
        super().__init__(path, known)
        self._steps: dict[int, list[AnyEvent]] = {}
        self._ended: set[int] = set()
        self._sampled: set[int] = set()
        self._made: list[AnyRecord] = []
        self._columns = ColumnWriter(self._made.append, MAX_PLAIN_SHAPES)

    def _take_other(self, trace: RankTrace, record: Samples | AnyEvent) -> None:  # type: ignore[override]
        if isinstance(record, Samples):
            self._sampled.add(record.step)
        if not isinstance(record, _Documented):
            return
        self._steps.setdefault(record.step, []).append(record)
        if isinstance(record, StepEnd):
            # Not this step itself: each of several optimizers ends it.
            self._finish(trace, [step for step in self._ended if step < record.step])
            self._ended.add(record.step)
        while len(self._steps) > MAX_OPEN:
            self._steps.pop(min(self._steps))

    def _finish(self, trace: RankTrace, steps: list[int]) -> None:
        """Put steps that have ended into columns."""
        for step in sorted(steps):
            self._ended.discard(step)
            events = sorted(self._steps.pop(step, []), key=lambda event: event.seq)
            try:
                if events and self._wants(step, events):
                    self._columns.add(step, events)
            except struct.error as error:
                self._note_damage(Damage(self.offset, 0, f"step {step} holds a number that is none: {error}"))
            self._sampled.discard(step)
            self._take_made(trace)

    def _wants(self, step: int, events: list[AnyEvent]) -> bool:
        return True

    def _take_made(self, trace: RankTrace) -> None:
        for record in self._made:
            if isinstance(record, StepShape):
                record.id += PLAIN_SHAPES
                trace.add([record])
            elif isinstance(record, StepColumns):
                record.shape += PLAIN_SHAPES
                self._take_columns(trace, record)
            elif isinstance(record, StepEnd):
                words = f"step {record.step} is unlike {MAX_PLAIN_SHAPES} others and was not compared"
                self._note_damage(Damage(self.offset, 0, words))
        self._made.clear()

    def _handed_out(self) -> list[Block]:
        if self.trace is not None:
            self._finish(self.trace, list(self._ended) if self.at_end else [])
            self._columns.flush()
            self._take_made(self.trace)
        return super()._handed_out()


class MeasuredReader(PlainReader):
    """The steps of a file that do not stand in columns, as blocks."""

    def _take_columns(self, trace: RankTrace, columns: StepColumns) -> None:
        if columns.shape >= PLAIN_SHAPES:
            super()._take_columns(trace, columns)


class UnmeasuredReader(PlainReader):
    """The steps of a file that hold no samples: those in columns, and those too many to have columns of their own."""

    def _wants(self, step: int, events: list[AnyEvent]) -> bool:
        wanted = step not in self._sampled and not any(is_sampled(event) for event in events)
        self.has_more |= not wanted
        return wanted

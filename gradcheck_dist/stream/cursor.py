"""A run read step by step: of every rank's file a window of a few steps is in memory at any time.

What belongs to a step (events, samples) is handed out with that step and then forgotten. Kept are the tables of
parameters and plans, and the few events of a step that a report shows as series or that tell which parameters are
reduced at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import (
    AmpUnscale,
    AnyRecord,
    Backward,
    Event,
    Loss,
    LossGradient,
    OptimizerStep,
    PipelineStep,
    Reduce,
    Samples,
    ScaleGrads,
    StepColumns,
    StepEnd,
    StepShape,
    ZeroGrad,
)
from gradcheck_dist.trace.reader import RankTrace, TraceTail
from gradcheck_dist.trace.run import Run, note_problems, read_manifest, require_folder, trace_files
from gradcheck_dist.trace.store import Place, Where, size_of

WINDOW_BYTES = 128 << 20
"""Read at a time, all ranks together; at least MIN_READ_BYTES a rank."""
MIN_READ_BYTES, MAX_READ_BYTES = 64 << 10, 1 << 20
HEADER_BYTES = 16 << 10
LATE_STEPS = 3
"""What an accelerator delivers late comes before the end of its step, and before the samples of the next recorded one;
without samples to tell, the ends of this many later steps end a step."""

_PASSING = (Loss, LossGradient, Backward, Reduce, ScaleGrads, ZeroGrad, PipelineStep, OptimizerStep)
"""Kinds of which many belong to one step, and that no report shows as a series."""


def is_sampled(event: Event) -> bool:
    """Whether this ends a step of which samples were taken: their number is told."""
    return isinstance(event, StepEnd) and event.num_rows is not None


@dataclass(frozen=True)
class Seen:
    """What a rank recorded of a step: a loss whose gradient was seen, an optimizer's step, a backward pass that reached
    a parameter; `measured` where that came with samples, or could not do without (watched.py compares the others)."""

    lost: bool = False
    stepped: bool = False
    trained: bool = False
    measured: bool = False


class RankCursor(TraceTail):
    """One rank's file, read forwards. `trace` holds tables and what belongs to the whole run; steps are taken out."""

    def __init__(self, path: Place, read_bytes: int) -> None:
        super().__init__(path)
        self._read_bytes = read_bytes
        self._steps: dict[int, list[AnyRecord]] = {}
        self._lost: set[int] = set()
        self._trained: set[int] = set()
        self._ended: set[int] = set()
        self._sampled: set[int] = set()
        self._documented: set[int] = set()
        self._reduces: set[tuple[object, ...]] = set()
        self.overflowed: set[int] = set()
        self.stepped: set[int] = set()
        self.finished = False

    def open(self) -> RankTrace:
        """Read up to the header.

        Raises:
            GradcheckError: as read_trace.
        """
        while self.trace is None and not self.finished:
            self.poll(final=True, limit=HEADER_BYTES)
            self.finished = self.at_end
        if self.trace is None:
            raise GradcheckError(
                f"{self.path} holds no header: the rank died before it wrote anything. Leave the file out or record "
                "again.",
                code="E503",
            )
        return self.trace

    def _read(self) -> None:
        self.poll(final=True, limit=self._read_bytes)
        self.finished = self.at_end

    def _receive(self, trace: RankTrace, records: list[AnyRecord]) -> None:
        tables: list[AnyRecord] = []
        for record in records:
            step = getattr(record, "step", None)
            if isinstance(record, StepShape | StepColumns):
                continue  # judged as arrays (watch.py)
            if step is None:
                tables.append(record)
                continue
            self._keep(step, record)
            if isinstance(record, Event):
                self._note(trace, record)
            elif isinstance(record, Samples):
                self._sampled.add(step)
        trace.add(tables)

    def _keep(self, step: int, record: AnyRecord) -> None:
        self._steps.setdefault(step, []).append(record)

    def _note(self, trace: RankTrace, event: Event) -> None:
        if isinstance(event, Reduce):
            kind = (event.impl, event.group, event.params)
            if kind not in self._reduces:
                self._reduces.add(kind)
                trace.events.append(event)
        elif not isinstance(event, _PASSING):
            trace.events.append(event)
            if isinstance(event, StepEnd):
                self._ended.add(event.step)
                if trace.header.columns and not is_sampled(event):
                    self._documented.add(event.step)
            elif isinstance(event, AmpUnscale) and event.found_inf:
                self.overflowed.add(event.step)
        elif isinstance(event, OptimizerStep):
            self.stepped.add(event.step)
        elif isinstance(event, Backward):
            self._trained.add(event.step)
        elif isinstance(event, LossGradient):
            self._lost.add(event.step)

    def _is_whole(self, step: int) -> bool:
        later = [other for other in self._steps if other > step]
        return (
            self.finished
            or sum(other in self._ended for other in later) >= LATE_STEPS
            or any(other in self._sampled and other in self._ended for other in later)
        )

    def next_step(self) -> int | None:
        """The next step of which everything has been read; None when there is none left."""
        while True:
            step = min(self._steps, default=None)
            if step is not None and self._is_whole(step):
                return step
            if self.finished:
                return None
            self._read()

    def seen(self, step: int) -> Seen:
        """Of the step that comes next."""
        trained = step in self._trained
        measured = trained and (step in self._sampled or step not in self._documented)
        return Seen(step in self._lost, step in self.stepped, trained, measured)

    def drop(self, step: int) -> None:
        """Go on behind a step in which no rank trained."""
        self._forget(step)

    def take(self, step: int) -> RankTrace:
        """This rank's part of one step, with the tables; empty when it recorded nothing of it."""
        assert self.trace is not None
        # Reductions of other steps tell which parameters are reduced at all.
        others = [event for event in self.trace.events if isinstance(event, Reduce) and event.step != step]
        part = self.trace.part([*others, *self._steps.get(step, [])])
        self._forget(step)
        return part

    def _forget(self, step: int) -> None:
        for kept in (self._ended, self._sampled, self._documented, self._lost, self._trained):
            kept.discard(step)
        self._steps.pop(step, None)


@dataclass
class Mark:
    """How much of a rank was known: events, damage and tables, and bytes."""

    num_events: int
    num_damage: int
    tables: tuple[int, ...]
    num_bytes: int
    overflowed: set[int]
    stepped: set[int]

    @classmethod
    def of(cls, cursor: RankCursor) -> Mark:
        trace = cursor.trace
        assert trace is not None
        tables = tuple(len(table) for table in trace.tables)
        overflowed, stepped = set(cursor.overflowed), cursor.stepped & cursor.overflowed
        return cls(len(trace.events), len(trace.damage), tables, trace.num_bytes, overflowed, stepped)

    def restore(self, cursor: RankCursor) -> None:
        trace = cursor.trace
        assert trace is not None
        del trace.events[self.num_events :], trace.damage[self.num_damage :]
        for table, count in zip(trace.tables, self.tables, strict=True):
            for key in list(table)[count:]:
                del table[key]
        trace.num_bytes, cursor.overflowed, cursor.stepped = self.num_bytes, self.overflowed, self.stepped


class RunCursor:
    """A run folder, read forwards, all ranks in step. `run` is what belongs to no single step, whole at the end.

    Raises:
        GradcheckError: as read_run: E502 another schema version, E504 no such folder, E505 a folder without any trace.
    """

    def __init__(self, path: Where) -> None:
        folder = require_folder(path)
        self.run = Run(folder, read_manifest(folder))
        files = trace_files(folder)
        self.num_bytes = sum(size_of(file) for file in files.values())
        share = WINDOW_BYTES // max(len(files), 1)
        read_bytes = min(max(share, MIN_READ_BYTES), MAX_READ_BYTES)
        self._cursors: dict[int, RankCursor] = {}
        self._unreadable: dict[int, str] = {}
        self.read_bytes = read_bytes
        cursors = {rank: self._rank(file) for rank, file in files.items()}
        for cursor in cursors.values():
            cursor.expect(HEADER_BYTES)
        for rank, cursor in cursors.items():
            try:
                self.run.ranks[rank] = cursor.open()
            except GradcheckError as error:
                if error.code == "E502":
                    raise
                self._unreadable[rank] = str(error)
                continue
            self._cursors[rank] = cursor
        note_problems(self.run, self._unreadable)
        self.marks: dict[int, dict[int, Mark]] | None = None
        self.blind_steps: list[int] = []
        """Steps read so far that are to be told as ledger.tracks.blind_steps does."""

    @property
    def num_bytes_read(self) -> int:
        return sum(cursor.offset for cursor in self._cursors.values())

    @property
    def skipped_steps(self) -> list[int]:
        """Steps read so far in which a GradScaler found an overflow and left the optimizer out."""
        overflowed = {step for cursor in self._cursors.values() for step in cursor.overflowed}
        if not overflowed:  # asked for every step
            return []
        return sorted(overflowed - {step for cursor in self._cursors.values() for step in cursor.stepped})

    def _rank(self, file: Place) -> RankCursor:
        return RankCursor(file, self.read_bytes)

    def steps(self) -> Iterator[tuple[int, Run]]:
        """Each step with a backward pass, ascending, as a run of that step alone."""
        for step in self._following():
            part = Run(self.run.path, self.run.manifest, problems=list(self.run.problems))
            part.ranks = {rank: cursor.take(step) for rank, cursor in self._cursors.items()}
            yield step, part

    def _following(self) -> Iterator[int]:
        while True:
            following = [step for cursor in self._cursors.values() if (step := cursor.next_step()) is not None]
            note_problems(self.run, self._unreadable)
            if not following:
                return
            step = min(following)
            seen = [cursor.seen(step) for cursor in self._cursors.values()]
            if not any(one.measured for one in seen):
                blind = not any(one.trained for one in seen) and any(one.lost for one in seen)
                if blind and any(one.stepped for one in seen):
                    self.blind_steps.append(step)
                for cursor in self._cursors.values():
                    cursor.drop(step)
                continue
            if self.marks is not None:
                self.marks[step] = {rank: Mark.of(cursor) for rank, cursor in self._cursors.items()}
            yield step

    def unmark(self, step: int) -> None:
        """Nobody will go back to this step."""
        if self.marks is not None:
            self.marks.pop(step, None)

    def rewind(self, step: int) -> None:
        """Forget what was read since a step was handed out, which depends on how many steps are judged at a time: `run`
        is as it was then. Takes `marks` that were {} from the start."""
        assert self.marks is not None
        for rank, mark in self.marks[step].items():
            mark.restore(self._cursors[rank])
        note_problems(self.run, self._unreadable)

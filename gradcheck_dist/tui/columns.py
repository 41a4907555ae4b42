"""Steps in columns as they are read: compared over all ranks at once.

The bytes that the light pass reads are judged there and then, block by block: a verdict over millions of contributions
stands when the files have been read, of a growing run as of a finished one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from gradcheck_dist.events import StepColumns, StepShape
from gradcheck_dist.objectives import DEFAULT_OBJECTIVE, check_objective
from gradcheck_dist.stream.findings import Groups
from gradcheck_dist.stream.summaries import Blocks, KnownShapes, Numbers, Round, summarise
from gradcheck_dist.stream.watch import Watch
from gradcheck_dist.stream.watched import Watched, result_of
from gradcheck_dist.trace.columns import events_of
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run


class ColumnWatch:
    """All ranks' columns. `take` and `settle` are called by the thread that reads, `result` by the one that judges."""

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self._lock = threading.Lock()
        self._groups = Groups()
        self._known: KnownShapes = {}
        self._makers: dict[int, Blocks] = {}
        self._shapes: dict[bytes, StepShape] = {}
        self._counts: dict[bytes, int] = {}
        self._numbers = Numbers()
        self._waiting = Round([], {}, {}, 0)
        self._objective: str | None = None
        self._watch: Watch | None = None
        self._ended = False

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when there is something new to say."""
        watch = self._watch
        return (watch.num_judged, self._groups.num_steps, len(watch.reasons)) if watch is not None else ()

    @property
    def num_off(self) -> int:
        """Steps that are off."""
        return self._groups.num_steps

    @property
    def whole_until(self) -> int | None:
        """Every rank has told of the steps up to this one."""
        return self._watch.last_step if self._watch is not None else None

    def series(self, name: str) -> list[tuple[int, float]]:
        """A curve of the steps that were compared: "loss", "grad_norm"."""
        return self._watch.series.points.get(name, []) if self._watch is not None else []

    def take(self, rank: int, trace: RankTrace, columns: StepColumns) -> int:
        """One record of a rank; the number of its events.

        Raises:
            ValueError: it does not fit its shape, or this is none.
            GradcheckError: E401 the header declares an unknown objective.
        """
        block = self._makers.setdefault(rank, Blocks(self._known)).block(trace, columns)
        if self._objective is None:
            self._objective = check_objective(trace.header.objective or DEFAULT_OBJECTIVE)
        number = self._numbers.number(block.shape, self._waiting.shapes)
        self._waiting.summaries.append(summarise(rank, number, block, self._objective))
        self.steps.update(range(block.first_step, block.first_step + block.num_steps))
        return block.num_steps * self._num_events(trace, columns.shape)

    def _num_events(self, trace: RankTrace, id: int) -> int:
        shape = trace.shapes[id]
        known = self._shapes.setdefault(shape.events, shape)
        if known is not shape:
            # Of a thousand ranks, most wrote the same: its bytes are kept once.
            trace.shapes[id] = StepShape(id=id, events=known.events)
        if shape.events not in self._counts:
            self._counts[shape.events] = len(events_of(shape))
        return self._counts[shape.events]

    def settle(self, ranks: Collection[int], *, known: bool, ended: bool) -> None:
        """Compare what all ranks have told of. `known`: these are all ranks; `ended`: nobody will write any more."""
        waiting = self._waiting
        if self._objective is None or not (known or ended) or not (waiting.summaries or (ended and not self._ended)):
            return
        if self._watch is None:
            self._watch = Watch(sorted(ranks), self._objective)
        late = {summary.rank for summary in waiting.summaries} - set(self._watch.ranks)
        waiting.summaries = [summary for summary in waiting.summaries if summary.rank not in late]
        self._ended = ended
        if ended:
            waiting.ended = {rank: [] for rank in self._watch.ranks}
        self._waiting = Round([], {}, {}, 0)
        with self._lock:
            for rank in late:
                problems = self._watch.problems_of.setdefault(rank, [])
                problems.append("it came late, and its steps in columns were not compared")
            for deviation in self._watch.take({0: waiting}):
                self._groups.add(deviation)

    def result(self, run: Run) -> Watched | None:
        """What has been seen so far; None when no step was compared. `run` has headers and places of the traces."""
        watch = self._watch
        if watch is None:
            return None
        with self._lock:
            return result_of(watch, self._groups, run)

"""Steps that are recorded without samples: their events go into columns."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import cast

from torch import Tensor

from gradcheck_dist.events import AnyEvent, AnyRecord, Event
from gradcheck_dist.probes.recording.deferred import Deferred, numbers_of, read
from gradcheck_dist.probes.recording.samples import NOTHING, HostCopies
from gradcheck_dist.trace.columns import ColumnWriter

FLUSH_INTERVAL_NS = 1_000_000_000
"""How long a killed rank's steps without samples may be unwritten."""
MAX_WAITING = 16
"""Steps that are put into columns together: code that runs once a step is in no cache."""


class UnsampledSteps:
    """Holds a step's events until the step is over and its numbers are on the host, and hands some steps at a time to
    the columns."""

    def __init__(self, write: Callable[[AnyRecord], None], copies: HostCopies) -> None:
        self._columns, self._copies = ColumnWriter(write), copies
        self._events: list[Event] = []
        self._waiting: deque[tuple[int, list[Event], Deferred, Tensor]] = deque()
        self._flushed_ns = 0

    def add(self, event: Event) -> None:
        """An event of the step that is under way."""
        self._events.append(event)

    def end_step(self, step: int, deferred: Deferred) -> None:
        """`deferred`: the step's events of which numbers lie on a device."""
        if not (self._events or deferred):
            return
        events, self._events = self._events, []
        numbers = numbers_of(deferred) or [NOTHING]
        self._copies.bring_together(numbers, functools.partial(self._come, step, events, deferred))
        self._copies.poll()

    def _come(self, step: int, events: list[Event], deferred: Deferred, host: Tensor) -> None:
        self._waiting.append((step, events, deferred, host))
        if time.perf_counter_ns() - self._flushed_ns > FLUSH_INTERVAL_NS:
            self.flush()
        elif len(self._waiting) >= MAX_WAITING:
            self._put_into_columns()

    def _put_into_columns(self) -> None:
        while self._waiting:
            step, events, deferred, host = self._waiting.popleft()  # with one that cannot be written no other is lost
            whole = sorted([*events, *read(deferred, host)], key=attrgetter("seq"))
            self._columns.add(step, cast(list[AnyEvent], whole))

    def flush(self) -> None:
        """Write the columns as far as they go."""
        self._flushed_ns = time.perf_counter_ns()
        self._put_into_columns()
        self._columns.flush()

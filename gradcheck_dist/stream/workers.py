"""Who reads and judges the steps of a run: this process and others of this machine. on_dask.py has other machines.

Whoever does: a step is judged by itself, out of the same records, and verdicts come in the order of steps. So the
report is the same, byte for byte.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Container, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Protocol

from gradcheck_dist.diagnosis.judged_alone import judge_alone
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.stream.cursor import RunCursor
from gradcheck_dist.stream.shares import read_shares
from gradcheck_dist.stream.summaries import MakeReader, Round
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trace.store import Place, Where

POOL_FROM_S = 0.3
"""A step that takes longer than this to judge is worth other processes, which take about as long to start."""

POOL_FROM_ROWS = 4_000
"""Samples of a step that surely takes longer: nobody waits for the first one to show it."""

Verdicts = Generator[StepVerdict, None, None]


class Workers(Protocol):
    """Reads and judges steps."""

    def open(self, path: Where) -> RunCursor:
        """The run, read forwards."""

    def read(
        self, files: dict[int, Place], objective: str, read_bytes: int, make: MakeReader
    ) -> Iterator[dict[int, Round]]:
        """The steps in columns, one round after the other, by share of the ranks."""

    def judge(self, cursor: RunCursor, wanted: Wanted, objective: str, objective_from: str) -> Verdicts:
        """One verdict a step of the cursor that is wanted, in their order. Closing the iterator ends the work."""


class Wanted:
    """Which steps are judged. `recorded` has all steps that were asked for so far."""

    def __init__(self, steps: Container[int] | None) -> None:
        self._steps = steps
        self.recorded: list[int] = []

    def take(self, cursor: RunCursor, step: int) -> bool:
        self.recorded.append(step)
        return (self._steps is None or step in self._steps) and step not in cursor.skipped_steps


class Processes:
    """This process, and up to `jobs` others where judging takes long."""

    def __init__(self, jobs: int = 1) -> None:
        self._jobs = jobs

    def open(self, path: Where) -> RunCursor:
        return RunCursor(path)

    def read(
        self, files: dict[int, Place], objective: str, read_bytes: int, make: MakeReader
    ) -> Iterator[dict[int, Round]]:
        return read_shares(files, objective, read_bytes, make, self._jobs)

    def judge(self, cursor: RunCursor, wanted: Wanted, objective: str, objective_from: str) -> Verdicts:
        pool: ProcessPoolExecutor | None = None
        waiting: deque[Future[StepVerdict]] = deque()
        try:
            takes_long = False
            asked = ((step, part) for step, part in cursor.steps() if wanted.take(cursor, step))
            for (step, part), is_last in _with_last(asked) if self._jobs > 1 else ((one, True) for one in asked):
                if pool is None and not is_last and (takes_long or _num_rows(part) >= POOL_FROM_ROWS):
                    # Not forked: the caller may have threads.
                    pool = ProcessPoolExecutor(self._jobs, multiprocessing.get_context("spawn"))
                if pool is None:
                    started = time.perf_counter()
                    yield judge_alone(part, step, objective, objective_from)
                    takes_long = time.perf_counter() - started > POOL_FROM_S
                    continue
                waiting.append(pool.submit(judge_alone, part, step, objective, objective_from))
                if len(waiting) > self._jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)


def _with_last(steps: Iterable[tuple[int, Run]]) -> Iterator[tuple[tuple[int, Run], bool]]:
    """Each step, with whether it is the last one: alone it is worth no other process."""
    held: tuple[int, Run] | None = None
    for one in steps:
        if held is not None:
            yield held, False
        held = one
    if held is not None:
        yield held, True


def _num_rows(part: Run) -> int:
    """How many gradients were sampled in a step, on all ranks."""
    return sum(samples.num_rows for trace in part.ranks.values() for samples in trace.samples)

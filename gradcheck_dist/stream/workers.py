"""Who reads and judges the steps of a run: this process and others of this machine. on_dask.py has other machines.

Whoever does: a step is judged by itself, out of the same records, and verdicts come in the order of steps. So the
report is the same, byte for byte.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Container, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Protocol

from gradcheck_dist.diagnosis.judged_alone import judge_alone
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.stream.cursor import RunCursor
from gradcheck_dist.stream.shares import read_shares
from gradcheck_dist.stream.summaries import MakeReader, Round
from gradcheck_dist.trace.store import Place, Where

POOL_FROM_S = 0.3
"""A step that takes longer than this to judge is worth other processes, which take about as long to start."""

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
            for step, part in cursor.steps():
                if not wanted.take(cursor, step):
                    continue
                if pool is None:
                    started = time.perf_counter()
                    yield judge_alone(part, step, objective, objective_from)
                    if self._jobs > 1 and time.perf_counter() - started > POOL_FROM_S:
                        # Not forked: the caller may have threads.
                        pool = ProcessPoolExecutor(self._jobs, multiprocessing.get_context("spawn"))
                    continue
                waiting.append(pool.submit(judge_alone, part, step, objective, objective_from))
                if len(waiting) > self._jobs:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

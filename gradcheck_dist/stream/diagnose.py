"""The diagnosis of a run folder, step after step: the same report as of a run read whole, in bounded memory."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType

from gradcheck_dist.diagnosis import engine
from gradcheck_dist.diagnosis.engine import conclude, not_recorded, objective_of
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.step_verdict import StepVerdict
from gradcheck_dist.stream.cursor import RunCursor
from gradcheck_dist.stream.verdicts import judge_part
from gradcheck_dist.stream.watched import add_to, watch_run
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trace.store import Where

POOL_FROM_S = 0.3
"""A step that takes longer than this to judge is worth other processes, which take about as long to start."""
MAX_WEIGHTS = 200_000
"""Rows of weights in a report; beyond them only steps with findings keep theirs."""


@dataclass(frozen=True)
class Progress:
    """How far a diagnosis has come. `share` of the run's bytes has been read; `found` counts steps with findings."""

    step: int
    num_judged: int
    found: int
    share: float

    def __str__(self) -> str:
        found = f", {self.found} with findings" if self.found else ""
        return f"step {self.step} judged, {self.num_judged} in all{found}, {self.share:.0%} of the run read"


def diagnose_run(
    path: Where,
    *,
    objective: str | None = None,
    steps: Collection[int] | None = None,
    first: bool = False,
    jobs: int = 1,
    progress: Callable[[Progress], None] | None = None,
    early: Callable[[Report], None] | None = None,
) -> Report:
    """Judge a recorded run from its folder.

    Args:
        path: the run folder, or its URL in a store that fsspec opens.
        objective: what a step's gradient is meant to be; None takes what the run declared, else global-token-mean.
        steps: optimizer steps to judge; None takes all that were recorded.
        first: stop at the first step with a finding.
        jobs: processes that judge steps side by side; the report does not depend on it.
        progress: called after each step.
        early: called once, with the report of the first step that has a finding, when more steps are to come.

    Raises:
        GradcheckError: E401 unknown objective, E402 none of the steps was recorded, and what RunCursor raises.
    """
    cursor = RunCursor(path)
    chosen, chosen_from = objective_of(cursor.run, objective)
    watched = None
    if any(trace.header.columns for trace in cursor.run.ranks.values()):

        def told(step: int, num_judged: int, num_found: int, share: float) -> None:
            if progress is not None:
                progress(Progress(step, num_judged, num_found, share))

        watched = watch_run(cursor.run, chosen, steps=steps, first=first, jobs=jobs, told=told)
    recorded: list[int] = []
    verdicts: list[StepVerdict] = []
    left_out = num_weights = num_found = 0
    stopped = False
    before = watched.first_finding if watched is not None and first else None
    with _Judges(jobs, chosen, chosen_from) as judges:
        for verdict in judges.verdicts(cursor, recorded, steps) if watched is None or watched.has_more else ():
            if before is not None and verdict.context.step > before:
                break
            found = any(finding.severity != "info" for finding in verdict.findings)
            num_found += found
            if num_weights + len(verdict.weights) > MAX_WEIGHTS and not found:
                verdict.weights, left_out = [], left_out + 1
            num_weights += len(verdict.weights)
            verdicts.append(verdict)
            if progress is not None:
                share = cursor.num_bytes_read / max(cursor.num_bytes, 1)
                progress(Progress(verdict.context.step, len(verdicts), num_found, share))
            if first and found:
                stopped = True
                break
            if found and early is not None:
                # A copy: concluding joins findings of several steps in place.
                early(conclude(cursor.run, [deepcopy(verdict)], [], chosen, chosen_from))
                early = None
    if recorded and not verdicts and steps is not None and not set(recorded) & set(steps):
        raise not_recorded(recorded)
    report = conclude(cursor.run, verdicts, cursor.skipped_steps, chosen, chosen_from)
    if watched is not None:
        add_to(report, watched, sampled=bool(verdicts))
        stopped |= watched.stopped
    if left_out:
        report.coverage.problems.append(f"the weights of {left_out} steps without findings are not listed")
    if stopped:
        report.coverage.problems.append("stopped at the first step with a finding: later steps were not judged")
    return report


def diagnose(run: Run, *, objective: str | None = None, steps: Collection[int] | None = None) -> Report:
    """Judge a recorded run, its steps in columns included.

    Args:
        run: as read by read_run.
        objective: what a step's gradient is meant to be; None takes what the run declared, else global-token-mean.
        steps: optimizer steps to judge; None takes all that were recorded.

    Raises:
        GradcheckError: E401 unknown objective, E402 none of the steps was recorded.
    """
    if any(trace.header.columns for trace in run.ranks.values()):
        return diagnose_run(run.path, objective=objective, steps=steps)
    return engine.diagnose(run, objective=objective, steps=steps)


class _Judges:
    """Judges steps, here or in other processes, and gives their verdicts in the order of steps."""

    def __init__(self, jobs: int, objective: str, objective_from: str) -> None:
        self._jobs, self._objective = jobs, (objective, objective_from)
        self._pool: ProcessPoolExecutor | None = None
        self._waiting: deque[Future[StepVerdict]] = deque()

    def __enter__(self) -> _Judges:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def verdicts(self, cursor: RunCursor, recorded: list[int], steps: Collection[int] | None) -> Iterator[StepVerdict]:
        """One verdict a step; `recorded` is filled with all steps seen."""
        for step, part in cursor.steps():
            recorded.append(step)
            if (steps is not None and step not in steps) or step in cursor.skipped_steps:
                continue
            if self._pool is None:
                started = time.perf_counter()
                yield judge_part(part, step, *self._objective)
                if self._jobs > 1 and time.perf_counter() - started > POOL_FROM_S:
                    # Not forked: the caller may have threads.
                    self._pool = ProcessPoolExecutor(self._jobs, multiprocessing.get_context("spawn"))
                continue
            self._waiting.append(self._pool.submit(judge_part, part, step, *self._objective))
            if len(self._waiting) > self._jobs:
                yield self._waiting.popleft().result()
        while self._waiting:
            yield self._waiting.popleft().result()

"""The diagnosis of a run folder, step after step: the same report as of a run read whole, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass

from gradcheck_dist.diagnosis import engine
from gradcheck_dist.diagnosis.engine import conclude, not_recorded, objective_of
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.losses.loud_ranks import waits_for_others
from gradcheck_dist.diagnosis.steps.alternatives import may_all_be_one_batch
from gradcheck_dist.diagnosis.steps.earlier_gradients import let_go
from gradcheck_dist.diagnosis.steps.schedules import may_warm_up
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.steps import chosen_steps
from gradcheck_dist.stream.watched import add_to, watch_run
from gradcheck_dist.stream.workers import Processes, Wanted, Workers
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trace.store import Where

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
    steps: Container[int] | None = None,
    first: bool = False,
    jobs: int = 1,
    workers: Workers | None = None,
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
        workers: who judges in their place, as stream.on_dask gives them.
        progress: called after each step.
        early: called once, with the report of the first step that has a finding, when more steps are to come.

    Raises:
        GradcheckError: E401 unknown objective, E402 none of the steps was recorded, and what RunCursor raises.
    """
    workers = workers or Processes(jobs)
    cursor = workers.open(path)
    if first:
        cursor.marks = {}
    chosen, chosen_from = objective_of(cursor.run, objective)
    watched = None
    if any(trace.header.columns for trace in cursor.run.ranks.values()):

        def told(step: int, num_judged: int, num_found: int, share: float) -> None:
            if progress is not None:
                progress(Progress(step, num_judged, num_found, share))

        watched = watch_run(cursor.run, chosen, steps=steps, first=first, read=workers.read, told=told)
    wanted = Wanted(steps)
    verdicts: list[StepVerdict] = []
    left_out = num_weights = num_found = 0
    stopped_at: int | None = None
    before = watched.first_finding if watched is not None and first else None
    with closing(workers.judge(cursor, wanted, chosen, chosen_from)) as judged:
        for verdict in judged if watched is None or watched.has_more else ():
            if before is not None and verdict.context.step > before:
                stopped_at = verdict.context.step
                break
            waits = (waits_for_others, may_all_be_one_batch, may_warm_up)
            found = bool(verdict.errors) and not any(one(verdict, verdicts) for one in waits)
            num_found += found
            if num_weights + len(verdict.weights) > MAX_WEIGHTS and not found:
                verdict.weights, left_out = [], left_out + 1
            num_weights += len(verdict.weights)
            if verdicts:
                let_go(verdicts[-1], verdict)
            verdicts.append(verdict)
            if progress is not None:
                share = cursor.num_bytes_read / max(cursor.num_bytes, 1)
                progress(Progress(verdict.context.step, len(verdicts), num_found, share))
            if first and found:
                stopped_at = verdict.context.step
                break
            cursor.unmark(verdict.context.step)
            if found and early is not None:
                # A copy: concluding joins findings of several steps in place.
                rests_on = verdicts if verdict.rests_on_others else [verdict]
                early(conclude(cursor.run, deepcopy(rests_on), [], chosen, chosen_from))
                early = None
    in_columns = watched is not None and watched.first_step is not None
    if wanted.recorded and steps is not None and not in_columns and not any(step in steps for step in wanted.recorded):
        raise not_recorded(wanted.recorded)
    if stopped_at is not None:
        cursor.rewind(stopped_at)
    blind = [step for step in cursor.blind_steps if steps is None or step in steps]
    if stopped_at is not None:  # others may have read ahead
        blind = [step for step in blind if step < stopped_at]
    report = conclude(cursor.run, verdicts, cursor.skipped_steps, chosen, chosen_from, blind)
    if watched is not None:
        add_to(report, watched, cursor.run, sampled=bool(verdicts), read=workers.read)
    if left_out:
        report.coverage.problems.append(f"the weights of {left_out} steps without findings are not listed")
    if stopped_at is not None or (watched is not None and watched.stopped):
        what = "with a finding" if report.verdict == "findings" else "that is off as documented"
        report.coverage.problems.append(f"stopped at the first step {what}: later steps were not judged")
    return report


def diagnose(run: Run | Where, *, objective: str | None = None, steps: Container[int] | str | None = None) -> Report:
    """Judge a recorded run, its steps in columns included.

    Args:
        run: as read by read_run, or its folder.
        objective: what a step's gradient is meant to be; None takes what the run declared, else global-token-mean.
        steps: optimizer steps to judge: a range, a collection, or text such as "0:3"; None takes all.

    Raises:
        GradcheckError: E401 unknown objective, E402 none of the steps was recorded, E712 `steps` names none; of a
            folder also what read_run raises.
    """
    chosen = chosen_steps(steps)
    if not isinstance(run, Run):
        return diagnose_run(run, objective=objective, steps=chosen)
    if any(trace.header.columns for trace in run.ranks.values()):
        return diagnose_run(run.path, objective=objective, steps=chosen)
    return engine.diagnose(run, objective=objective, steps=chosen)

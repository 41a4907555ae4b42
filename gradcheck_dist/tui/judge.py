"""Judging beside reading: a thread of its own, so that a long judgement never holds up what the ranks write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gradcheck_dist.diagnosis.engine import diagnose, judge_step
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports.document import Document, build
from gradcheck_dist.reports.text import spans
from gradcheck_dist.reports.weights import shown_step, tolerance
from gradcheck_dist.tui.grid import WeightGrid, build_grid, param_grid
from gradcheck_dist.tui.live_run import LiveRun
from gradcheck_dist.tui.snapshot import OtherRun
from gradcheck_dist.tui.step_view import StepView

MAX_STEPS = 64
"""Steps judged of a finished run: the first half and the last half of them."""
FIRST_STEPS = 4
"""Judged before all others, so that a verdict stands early."""
MAX_LIVE_STEPS = 8
MAX_RANK_STEPS = 1024
"""Of many ranks fewer steps are judged: at most so many ranks times steps, and at least one step."""
READ_FIRST_RANKS = 64
"""A finished run of more ranks is read to its end before it is judged: both at once take longer."""
DUTY = 4.0
"""After a judgement that took t, the next one begins no sooner than DUTY * t later: a quarter of a core at most."""


@dataclass(frozen=True)
class Judged:
    """What the last judgement came to. `recorded` are the steps known then, `judged` those that the report covers."""

    report: Report | None = None
    document: Document | None = None
    recorded: tuple[int, ...] = ()
    judged: tuple[int, ...] = ()
    step: StepView | None = None
    grid: WeightGrid | None = None
    problem: str = ""


class Judge:
    """Judges whole steps when there are new ones, and keeps the step that is looked at in detail."""

    def __init__(self, run: LiveRun, wake: Callable[[], None]) -> None:
        self.now = Judged()
        self._run, self._wake = run, wake
        self._known: tuple[object, ...] = ()
        self._not_before_s = 0.0
        self._views: dict[int, StepView] = {}
        self._doing: tuple[str, float] | None = None

    @property
    def doing(self) -> str:
        """What is being judged right now; how long already when that takes seconds."""
        doing = self._doing
        if doing is None:
            return ""
        what, started = doing
        seconds = int(time.monotonic() - started)
        return f"{what}, {seconds} s" if seconds >= 2 else what

    def look(self, wanted: int | None) -> None:
        """Start what there is to do: judge again when steps, ranks or the run's end are new; else show a step."""
        if self._doing is not None:
            return
        run = self._run
        whole, live, complete = run.whole_steps(), run.live, run.share_read == 1.0
        limit = FIRST_STEPS if self.now.report is None else MAX_LIVE_STEPS if live or not complete else MAX_STEPS
        limit = max(1, min(limit, MAX_RANK_STEPS // max(1, run.num_files)))
        settled = () if live or not complete else run.counts()
        state = (tuple(whole[-1:]), min(len(whole), limit), live, run.num_files, complete, settled)
        if not complete and not live and run.num_files > READ_FIRST_RANKS:
            return
        ready = whole or (complete and not live and run.num_files)
        if ready and state != self._known and time.monotonic() >= self._not_before_s:
            self._known = state
            self._start(f"judging {_some(whole, limit)}", lambda: self._judge(whole, limit, wanted, live))
        elif self.now.report is not None and self.now.recorded:
            step = self._choose(wanted, self.now)
            if self.now.step is None or step != self.now.step.step:
                self._start(f"judging step {step}", lambda: self._detail(step))

    def _start(self, what: str, work: Callable[[], None]) -> None:
        started = time.monotonic()
        self._doing = (what, started)

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # a trace that breaks the judgement must not end the watching
                self.now = replace(self.now, problem=words(error))
            finally:
                self._not_before_s = time.monotonic() + DUTY * (time.monotonic() - started) if self._run.live else 0.0
                self._doing = None
                self._wake()

        threading.Thread(target=guarded, name="gradcheck-judge", daemon=True).start()

    def _judge(self, whole: list[int], limit: int, wanted: int | None, live: bool) -> None:
        before = self.now.report
        faulty = before.findings[0].step if before is not None and before.findings else None
        chosen = choose_steps(whole, limit, faulty)
        recorded = self._run.run(chosen)
        if not recorded.ranks:
            return
        report = diagnose(recorded, steps=chosen or None)
        judged = Judged(report, build(report), tuple(whole), tuple(chosen))
        self._views.clear()
        self.now = self._with_step(judged, self._choose(wanted, judged)) if whole else judged

    def _detail(self, step: int) -> None:
        self.now = self._with_step(self.now, step)

    def _choose(self, wanted: int | None, judged: Judged) -> int:
        """The wanted step, -1 for the newest, else the one that tells most."""
        steps, report = judged.recorded, judged.report
        if wanted is not None and wanted in steps:
            return wanted
        found = report.findings if report is not None else []
        return steps[-1] if wanted == -1 or not found else found[0].step

    def _with_step(self, judged: Judged, step: int) -> Judged:
        assert judged.report is not None
        view = self._views.get(step)
        if view is None:
            info, accuracy = judged.report.run, tolerance(judged.report)
            verdict = judge_step(self._run.run([step]), step, info.objective, info.objective_from)
            culprits = frozenset((f.first_event.rank, f.first_event.seq) for f in verdict.findings if f.first_event)
            view = self._views[step] = StepView(verdict, culprits, accuracy)
            while len(self._views) > 4:
                self._views.pop(next(iter(self._views)))
            _ = view.marks, view.held_by, view.params  # made here: the screens' thread only draws
        grid = build_grid(view.verdict.weights, step, view.tolerance)
        grid.warm()
        return replace(judged, step=view, grid=grid, problem="")


def words(error: Exception) -> str:
    """An error for a screen: a message to the user as it is, anything else with its kind."""
    if isinstance(error, GradcheckError):
        return str(error)
    return (
        f"This run cannot be judged ({type(error).__name__}: {error}). If gradcheck recorded it and nobody changed it "
        "since, this is a bug: please report it."
    )


def choose_steps(steps: list[int], limit: int, keep: int | None = None) -> list[int]:
    """At most about `limit` steps: the first and the last ones, and `keep`, so that a finding is not forgotten."""
    if len(steps) <= limit:
        return steps
    half = max(1, limit // 2)
    return sorted({*steps[:half], *(steps[half - limit :] if limit > half else ()), *([keep] if keep in steps else [])})


def _some(steps: list[int], limit: int) -> str:
    if not steps:
        return "what was recorded"
    chosen = choose_steps(steps, limit)
    return f"step {chosen[0]}" if len(chosen) == 1 else f"{len(chosen)} steps ({spans(chosen)})"


def read_other(path: str) -> OtherRun:
    """Read and judge another run as this one is judged."""
    from gradcheck_dist.tui.source import choose_run

    try:
        run = LiveRun(choose_run(Path(path)))
        while run.poll() and run.share_read < 1.0:
            pass
        steps = choose_steps(run.whole_steps(), max(1, min(MAX_STEPS, MAX_RANK_STEPS // max(1, run.num_files))))
        recorded = run.run(steps)
        if not recorded.ranks:
            raise GradcheckError(f"{path} holds no readable trace. {' '.join(recorded.problems[:3])}", code="E754")
        report = diagnose(recorded, steps=steps or None)
        document = build(report)
        step, grid = shown_step(report), None
        if step is not None:
            verdict = judge_step(recorded, step, report.run.objective, report.run.objective_from)
            grid = param_grid(verdict, tolerance(report))
    except Exception as error:  # whatever the other run holds, this one is still shown
        return OtherRun(path, problem=words(error))
    return OtherRun(path, document.title, report, document, grid)

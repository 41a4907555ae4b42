"""Where snapshots come from: a thread that tails a run folder, judges whole steps and hands over what changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Protocol

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.tui.snapshot import OtherRun, Snapshot

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Report
    from gradcheck_dist.reports.document import Document
    from gradcheck_dist.trace.run import Run
    from gradcheck_dist.tui.grid import WeightGrid
    from gradcheck_dist.tui.live_run import LiveRun
    from gradcheck_dist.tui.step_view import StepView

POLL_S = 1 / 20
IDLE_POLL_S = 0.25
SIBLINGS_S = 5.0
MAX_STEPS = 64
"""Steps judged of a finished run: the first half and the last half of them."""
FIRST_STEPS = 4
"""Judged before all others, so that a verdict stands early."""
MAX_LIVE_STEPS = 8
DUTY = 4.0
"""After a judgement that took t, the next one begins no sooner than DUTY * t later: a quarter of a core at most."""


class Source(Protocol):
    """What the app watches. All methods but `snapshots` may be called from any thread."""

    def snapshots(self) -> Iterator[Snapshot]:
        """Blocks between snapshots; ends after `stop`."""

    def stop(self) -> None: ...

    def show_step(self, step: int | None) -> None:
        """Ask for a step in detail; None follows the newest."""

    def compare_with(self, path: str) -> None:
        """Ask for another run on the right side of the comparison."""


class FolderSource:
    """Watches a run folder. Anything that cannot be read becomes a snapshot that says so, never an exception."""

    def __init__(self, path: Path, *, compare: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._stopped = Event()
        self._asked = Event()
        self._wanted_step: int | None = None
        self._wanted_other = str(compare) if compare is not None else None
        self._other: OtherRun | None = None
        self._beside: tuple[float, tuple[str, ...]] = (float("-inf"), ())

    def stop(self) -> None:
        self._stopped.set()
        self._asked.set()

    def show_step(self, step: int | None) -> None:
        self._wanted_step = step
        self._asked.set()

    def compare_with(self, path: str) -> None:
        self._wanted_other = path
        self._asked.set()

    def snapshots(self) -> Iterator[Snapshot]:
        try:
            yield from self._watch()
        except Exception as error:  # the screen must say what happened, whatever it was
            yield Snapshot(str(self.path), "error", words(error))
            self._stopped.wait()

    def _watch(self) -> Iterator[Snapshot]:
        # Here and not above: the first frame must not wait for numpy.
        from gradcheck_dist.tui.live_run import LiveRun

        path = choose_run(self.path)
        run, judge = LiveRun(path, self._clock), _Judge()
        last: tuple[object, ...] | None = None
        while not self._stopped.is_set():
            changed = run.poll()
            self._asked.clear()
            snapshot = self._snapshot(run, judge)
            told = (snapshot.phase, snapshot.message, snapshot.live, snapshot.ranks, snapshot.siblings)
            shown = (told, snapshot.num_events, *map(id, (snapshot.report, snapshot.step, snapshot.other)))
            if shown != last:
                last = shown
                yield snapshot
            self._asked.wait(POLL_S if changed else IDLE_POLL_S)

    def _snapshot(self, run: LiveRun, judge: _Judge) -> Snapshot:
        lines, series = run.lines(), run.series()
        num_events, num_bytes = run.counts()
        judge.look(run, self._wanted_step)
        self._load_other(run.path, judge)
        phase, message = _phase(run, lines_trouble=[line.detail for line in lines if line.state == "unreadable"])
        if judge.problem:
            phase, message = "error", judge.problem
        elif judge.report is not None:
            phase, message = "ready", ""
        return Snapshot(
            path=str(run.path),
            phase=phase,  # type: ignore[arg-type]
            message=message,
            live=run.live,
            ranks=lines,
            world_size=len(lines),
            recorded=tuple(judge.recorded),
            judged=tuple(judge.judged),
            report=judge.report,
            document=judge.document,
            step=judge.step,
            grid=judge.grid,
            series=series,
            siblings=self._siblings(run.path),
            other=self._other,
            num_events=num_events,
            num_bytes=num_bytes,
        )

    def _siblings(self, path: Path) -> tuple[str, ...]:
        """Looked for every few seconds only: the folder above may hold many."""
        now = time.monotonic()
        if now - self._beside[0] > SIBLINGS_S:
            self._beside = (now, siblings(path))
        return self._beside[1]

    def _load_other(self, path: Path, judge: _Judge) -> None:
        if judge.report is None:
            return
        if self._wanted_other is None and self._other is None and judge.report.run.scenario:
            others = [Path(one) for one in siblings(path)]
            fixed = [one for one in others if "fix" in one.name or "good" in one.name]
            self._wanted_other = str((fixed or others)[0]) if others else None
        if self._wanted_other is not None and (self._other is None or self._other.path != self._wanted_other):
            self._other = read_other(self._wanted_other)


class _Judge:
    """Judges whole steps when there are new ones, and keeps the step that is looked at in detail."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.document: Document | None = None
        self.step: StepView | None = None
        self.grid: WeightGrid | None = None
        self.recorded: list[int] = []
        self.judged: list[int] = []
        self.problem = ""
        self._known: tuple[object, ...] = ()
        self._not_before_s = 0.0
        self._views: dict[int, StepView] = {}

    def look(self, run: LiveRun, wanted: int | None) -> None:
        """Judge again when steps, ranks or the run's end are new; show the wanted step, else the telling one."""
        whole = run.whole_steps()
        limit = FIRST_STEPS if self.report is None else MAX_LIVE_STEPS if run.live else MAX_STEPS
        state = (tuple(whole[-1:]), min(len(whole), limit), run.live, run.num_files, () if run.live else run.counts())
        if (whole or not run.live) and state != self._known and time.monotonic() >= self._not_before_s:
            started = time.monotonic()
            self._judge(run, whole, limit)
            self._known = state
            self._not_before_s = time.monotonic() + DUTY * (time.monotonic() - started) if run.live else 0.0
        self._detail(run, wanted)

    def _judge(self, run: LiveRun, whole: list[int], limit: int) -> None:
        from gradcheck_dist.diagnosis.engine import diagnose
        from gradcheck_dist.reports.document import build

        try:
            recorded = run.run()
        except GradcheckError as error:
            self.problem = str(error)
            return
        if not recorded.ranks:
            return
        self.recorded = steps = whole
        faulty = self.report.findings[0].step if self.report is not None and self.report.findings else None
        chosen = choose_steps(steps, limit, faulty)
        try:
            self.report = diagnose(recorded, steps=chosen or None)
            self.document = build(self.report)
            self.problem = ""
        except Exception as error:  # a trace that breaks the judgement must not end the watching
            self.problem = words(error)
            return
        self.judged = chosen
        self._views.clear()

    def _detail(self, run: LiveRun, wanted: int | None) -> None:
        if self.report is None or not self.recorded:
            return
        telling = self.report.findings[0].step if self.report.findings else self.recorded[-1]
        step = wanted if wanted in self.recorded else self.recorded[-1] if wanted == -1 else telling
        if step in self._views:
            view = self._views[step]
        else:
            view = self._views[step] = self._view(run.run(), step)
            while len(self._views) > 4:
                self._views.pop(next(iter(self._views)))
        if view is not self.step:
            from gradcheck_dist.reports.weights import tolerance
            from gradcheck_dist.tui.grid import build_grid

            self.step = view
            self.grid = build_grid(view.verdict.weights, step, tolerance(self.report))

    def _view(self, run: Run, step: int) -> StepView:
        from gradcheck_dist.diagnosis.engine import judge_step
        from gradcheck_dist.reports.weights import tolerance
        from gradcheck_dist.tui.step_view import StepView

        assert self.report is not None
        verdict = judge_step(run, step, self.report.run.objective, self.report.run.objective_from)
        culprits = frozenset((f.first_event.rank, f.first_event.seq) for f in verdict.findings if f.first_event)
        return StepView(verdict, culprits, tolerance(self.report))


def _phase(run: LiveRun, lines_trouble: list[str]) -> tuple[str, str]:
    if not run.path.exists():
        return "waiting", f"There is no folder {run.path} yet. This screen goes on as soon as a rank writes into it."
    if not run.path.is_dir():
        return "error", f"{run.path} is a file, not a run folder. Name the folder in which it lies."
    if not run.num_files:
        return "waiting", (
            f"{run.path} holds no rank-*.trace file. If a training is about to write there, just wait: this screen "
            "goes on by itself. Otherwise name a folder that `gradcheck run --out` or `scenario --keep` wrote."
        )
    if len(lines_trouble) == run.num_files:
        return "error", "No trace in this folder can be read. " + " ".join(lines_trouble[:3])
    if run.live:
        return "recording", "Recording. The first verdict comes with the first whole optimizer step."
    return "waiting", (
        "The ranks wrote no whole record before they stopped: there is nothing to judge yet. If they still run, this "
        "screen goes on by itself."
    )


def words(error: Exception) -> str:
    """An error for a screen: a message to the user as it is, anything else with its kind."""
    if isinstance(error, GradcheckError):
        return str(error)
    return f"This run cannot be judged; please report it. {type(error).__name__}: {error}"


def choose_run(path: Path) -> Path:
    """The folder itself, or, when it holds only run folders (variants of a scenario), the one to look at first."""
    from gradcheck_dist.trace.run import trace_files

    if not path.is_dir() or trace_files(path):
        return path
    inside = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and trace_files(entry)][:64]
    healthy = [entry for entry in inside if "fix" in entry.name or "good" in entry.name]
    return next((entry for entry in inside if entry not in healthy), inside[0] if inside else path)


def siblings(path: Path) -> tuple[str, ...]:
    """Other run folders beside this one."""
    from gradcheck_dist.trace.run import trace_files

    try:
        beside = sorted(entry for entry in path.resolve().parent.iterdir() if entry.is_dir())[:64]
        return tuple(str(entry) for entry in beside if entry != path.resolve() and trace_files(entry))
    except OSError:
        return ()


def choose_steps(steps: list[int], limit: int, keep: int | None = None) -> list[int]:
    """At most about `limit` steps: the first and the last ones, and `keep`, so that a finding is not forgotten."""
    if len(steps) <= limit:
        return steps
    half = limit // 2
    return sorted({*steps[:half], *steps[-(limit - half) :], *([keep] if keep in steps else [])})


def read_other(path: str) -> OtherRun:
    """Read and judge another run whole."""
    from gradcheck_dist.diagnosis.engine import diagnose, judge_step
    from gradcheck_dist.ledger.tracks import steps_of
    from gradcheck_dist.reports.document import build
    from gradcheck_dist.reports.weights import shown_step, tolerance
    from gradcheck_dist.trace.run import read_run
    from gradcheck_dist.tui.grid import param_grid

    try:
        run = read_run(choose_run(Path(path)))
        report = diagnose(run, steps=choose_steps(steps_of(run), MAX_STEPS) or None)
        document = build(report)
        step, grid = shown_step(report), None
        if step is not None:
            verdict = judge_step(run, step, report.run.objective, report.run.objective_from)
            grid = param_grid(verdict, tolerance(report))
    except Exception as error:  # whatever the other run holds, this one is still shown
        return OtherRun(path, problem=words(error))
    return OtherRun(path, document.title, report, document, grid)

"""Judging beside reading: a thread of its own, so that a long judgement never holds up what the ranks write.

What takes long is judged in a process of its own (sweep.py): all steps of a long run, and runs of so many ranks that
measuring one step takes minutes. Steps in columns were compared when they were read (columns.py).
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradcheck_dist.diagnosis.engine import conclude, objective_of
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.alternatives import trained_apart
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, recorded_norms
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.ledger.tracks import skipped_steps
from gradcheck_dist.reports.document import Document, build
from gradcheck_dist.reports.text import spans
from gradcheck_dist.reports.weights import shown_step, tolerance
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.stream.watched import Watched, add_to
from gradcheck_dist.trace.run import Run
from gradcheck_dist.tui.documented_view import Meant, documented_view, lanes_of
from gradcheck_dist.tui.grid import WeightGrid, build_grid, param_grid
from gradcheck_dist.tui.live_run import LiveRun
from gradcheck_dist.tui.snapshot import OtherRun
from gradcheck_dist.tui.step_view import StepView
from gradcheck_dist.tui.sweep import Sweep

MAX_STEPS = 64
"""Steps measured here of a finished run: the first half and the last half of them. A sweep judges all."""
FIRST_STEPS, FIRST_RANK_STEPS = 4, 64
"""Judged before all others, so that a verdict stands early: so many steps, or so many ranks times steps."""
MAX_LIVE_STEPS = 8
MAX_RANK_STEPS = 1024
"""Of many ranks fewer steps are judged: at most so many ranks times steps, and at least one step."""
MANY_RANKS = 64
"""Of more ranks, recorded operations are compared before anything is measured."""
MAX_MEASURED_RANKS = 256
"""Of more ranks nothing is measured here: one step takes minutes."""
DUTY = 8.0
"""After a judgement that took t, the next one begins no sooner than DUTY * t later: a ninth of a core at most."""


@dataclass(frozen=True)
class Judged:
    """What the last judgement came to. `recorded` are the steps known then, `judged` those that the report covers.
    `apart`: each rank is judged on tokens of its own, since ranks average parameters."""

    report: Report | None = None
    document: Document | None = None
    recorded: tuple[int, ...] = ()
    judged: tuple[int, ...] = ()
    step: StepView | None = None
    grid: WeightGrid | None = None
    problem: str = ""
    norms: dict[int, float] = field(default_factory=dict)
    apart: bool = False


class Judge:
    """Judges whole steps when there are new ones, and keeps the step that is looked at in detail."""

    def __init__(self, run: LiveRun, wake: Callable[[], None]) -> None:
        self.now = Judged()
        self._run, self._wake = run, wake
        self._known: tuple[object, ...] = ()
        self._not_before_s = 0.0
        self._wanted: int | None = None
        self._views: dict[int, tuple[StepView, WeightGrid]] = {}
        self._doing: tuple[str, float] | None = None
        self._sweep: Sweep | None = None
        self._stopped = False

    @property
    def doing(self) -> str:
        """What is being judged right now; how long already when that takes seconds."""
        doing = self._doing
        if doing is None:
            return self._sweep.progress if self._sweep is not None and not self._sweep.done else ""
        what, started = doing
        seconds = int(time.monotonic() - started)
        return f"{what}, {seconds} s" if seconds >= 2 else what

    def stop(self) -> None:
        """End the process that judges, if there is one."""
        self._stopped = True
        if self._sweep is not None:
            self._sweep.stop()

    def look(self, wanted: int | None) -> None:
        """Start what there is to do: judge again when steps, ranks or the run's end are new; else show a step. While
        many steps are judged, the wanted one is shown between two of them."""
        self._wanted = wanted
        if self._doing is not None or self._stopped:
            return
        run = self._run
        whole, live, complete = run.whole_steps(), run.live, run.share_read == 1.0
        self._sweep_if_long(whole, live, complete)
        limit = self._limit(live, complete)
        settled = () if live or not complete else run.counts()
        columns = run.columns.version if live or complete else (run.columns.num_off > 0,)
        sweep = self._sweep.version if self._sweep is not None else 0
        state = (tuple(whole[-1:]), min(len(whole), limit), live, run.num_files, complete, settled, columns, sweep)
        early = run.columns.num_off > 0 or sweep
        if not early and self._sweep is not None and self._sweep.documented:
            return
        if not complete and not live and run.num_files > MANY_RANKS and not early:
            return
        ready = whole or early or (live and columns) or (complete and not live and run.num_files)
        if ready and state != self._known and time.monotonic() >= self._not_before_s:
            self._known = state
            self._start(self._words(whole, limit), lambda: self._judge(whole, limit))
        elif self.now.report is not None and self.now.recorded:
            step = self._choose(wanted, self.now)
            if self.now.step is None or step != self.now.step.step:
                self._start(f"judging step {step}", lambda: self._detail(step))

    def _limit(self, live: bool, complete: bool) -> int:
        """How many steps may be measured here."""
        run, sweep = self._run, self._sweep
        if run.num_files > MAX_MEASURED_RANKS or (sweep is not None and sweep.documented and not sweep.done):
            return 0
        if run.num_files > MANY_RANKS:
            return 1
        first = self.now.report is None
        limit = FIRST_STEPS if first else MAX_LIVE_STEPS if live or not complete else MAX_STEPS
        return max(1, min(limit, (FIRST_RANK_STEPS if first else MAX_RANK_STEPS) // max(1, run.num_files)))

    def _words(self, whole: list[int], limit: int) -> str:
        if self._sweep is not None and self._sweep.report is not None:
            return "judging all steps"
        return f"judging {_some(whole, limit)}" if whole and limit else "judging what was recorded"

    def _sweep_if_long(self, whole: list[int], live: bool, complete: bool) -> None:
        """Judge all steps of a finished run in another process, where that takes long."""
        if live or self._sweep is not None or not whole:
            return
        many = self._run.num_files > MANY_RANKS
        more = complete and self.now.report is not None and len(self.now.judged) >= min(MAX_STEPS, len(whole))
        if many or (more and len(whole) > len(self.now.judged)):
            self._sweep = Sweep(self._run.path, self._wake, documented=many)

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

    def _judge(self, whole: list[int], limit: int) -> None:
        before, sweep, columns = self.now.report, self._sweep, self._run.column_steps()
        recorded = tuple(sorted({*whole, *columns}))
        if sweep is not None and sweep.report is not None and not sweep.done and before is not None and before.findings:
            return  # of the first step with a finding alone: of more steps is known here
        self._views.clear()
        if sweep is not None and sweep.report is not None:
            covered = recorded if sweep.done else self.now.judged
            judged = Judged(
                sweep.report, build(sweep.report), recorded, covered, norms=self.now.norms, apart=self.now.apart
            )
            self.now = self._with_step(judged, self._choose(self._wanted, judged))
            return
        faulty = before.findings[0].step if before is not None and before.findings else None
        chosen = choose_steps(whole, limit, faulty) if limit else []
        run = self._run.run(chosen)
        if not run.ranks:
            return
        report, verdicts, apart = _measure(run, chosen, self._run.blind_steps(), self._show_wanted)
        in_columns = self._run.columns.result(run)
        if in_columns is not None:
            add_to(report, in_columns, run, sampled=bool(chosen))
        compared = sweep.watched if sweep is not None else None
        if compared is not None:
            add_to(report, without_measured(compared, verdicts), run, sampled=bool(chosen), plain=True)
        covered = recorded if compared is not None else tuple(sorted({*chosen, *columns}))
        norms = self.now.norms | recorded_norms(verdicts)
        judged = Judged(report, build(report), recorded, covered, norms=norms, apart=apart)
        if recorded:
            step = self._choose(self._wanted, judged)
            self._keep_shown(verdicts, step, report)
            judged = self._with_step(judged, step)
        self.now = judged

    def _show_wanted(self) -> None:
        """Show the step that somebody asks for meanwhile; judging the others goes on behind it."""
        judged, wanted = self.now, self._wanted
        if wanted is None or judged.step is None or wanted == judged.step.step or wanted not in judged.recorded:
            return
        self._detail(wanted)
        self._wake()

    def _detail(self, step: int) -> None:
        self.now = self._with_step(self.now, step)

    def _choose(self, wanted: int | None, judged: Judged) -> int:
        """The wanted step; else, or where -1 asks for the newest, the one that tells most. Of a run that was cut off
        inside a step, that is no step which some rank did not end, while there is a whole one."""
        steps, report = judged.recorded, judged.report
        if wanted is not None and wanted in steps:
            return wanted
        found = report.findings if report is not None else []
        if found and wanted != -1:
            return found[0].step
        return self._run.last_ended(steps)

    def _keep_shown(self, verdicts: Sequence[StepVerdict], step: int, report: Report) -> None:
        """The step that will be shown was judged a moment ago."""
        for verdict in verdicts:
            measured = any(held.cells for held in verdict.held)
            if verdict.context.step == step and (measured or self._run.num_files <= MANY_RANKS):
                self._keep(verdict, tolerance(report))

    def _with_step(self, judged: Judged, step: int) -> Judged:
        assert judged.report is not None
        if step not in self._views:
            info, accuracy = judged.report.run, tolerance(judged.report)
            if self._run.in_columns(step) or self._run.num_files > MANY_RANKS:
                findings = [finding for finding in judged.report.findings if step in (finding.step, *finding.steps)]
                lanes = lanes_of(self._run.ranks, findings)
                run, meant = self._run.run([step], lanes), Meant(info.objective, info.objective_from)
                self._views[step] = documented_view(run, lanes, step, findings, meant, accuracy)
            else:
                verdict = judge_step(self._run.run([step]), step, info.objective, info.objective_from)
                self._keep(_seen(verdict, judged.apart), accuracy)
            while len(self._views) > 4:
                self._views.pop(next(iter(self._views)))
        view, grid = self._views[step]
        _ = view.marks, view.held_by, view.params  # made here: the screens' thread only draws
        grid.warm()
        return replace(judged, step=view, grid=grid, problem="")

    def _keep(self, verdict: StepVerdict, accuracy: float) -> None:
        grid = build_grid(verdict.weights, verdict.context.step, accuracy)
        self._views[verdict.context.step] = StepView(verdict, accuracy), grid


def _measure(
    run: Run, steps: Sequence[int], blind: Sequence[int], between: Callable[[], None] = lambda: None
) -> tuple[Report, list[StepVerdict], bool]:
    """The report over these steps, the verdicts that it was made of, and whether these see each rank apart. `between`
    is called before each step."""
    objective, objective_from = objective_of(run, None)
    skipped = skipped_steps(run)
    verdicts = []
    for step in steps:
        between()
        if step not in skipped:
            verdicts.append(judge_step(run, step, objective, objective_from))
    apart = trained_apart(run, verdicts) is not None
    report = conclude(run, list(verdicts), skipped, objective, objective_from, blind)
    return report, [_seen(verdict, apart) for verdict in verdicts], apart


def _seen(verdict: StepVerdict, apart: bool) -> StepVerdict:
    """The verdict that the report takes where ranks train apart, or do not."""
    return verdict.alone if apart and verdict.alone is not None else verdict


def without_measured(watched: Watched, verdicts: Sequence[StepVerdict]) -> Watched:
    """What documentation says, where samples do not say otherwise: nothing of deviations that a measured step shows to
    be none, and nothing twice of steps that were all measured."""
    measured = {verdict.context.step for verdict in verdicts if any(held.cells for held in verdict.held)}
    right = measured - {
        verdict.context.step for verdict in verdicts for one in verdict.findings if one.severity != "info"
    }
    steps = [{one.step, *one.steps} for one in watched.findings]
    kept = [at for at, of_one in enumerate(steps) if not right & of_one and of_one - measured]
    return replace(
        watched,
        findings=[watched.findings[at] for at in kept],
        deviations=[watched.deviations[at] for at in kept],
    )


def words(error: Exception) -> str:
    """An error for a screen: a message to the user as it is; of anything else what to do, and where it came up."""
    if isinstance(error, GradcheckError):
        return str(error)
    if isinstance(error, OSError):
        return f"This run cannot be read: {error.strerror or error}. Look at the folder, then open it again."
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        "This run cannot be shown: what its files hold does not fit together. If gradcheck recorded it and nobody "
        f"changed it since, this is a bug: please report it, with {Path(place.filename).name}:{place.lineno}."
    )


def choose_steps(steps: list[int], limit: int, keep: int | None = None) -> list[int]:
    """At most about `limit` steps: the first and the last ones, and `keep`, so that a finding is not forgotten."""
    if len(steps) <= limit:
        return steps
    half = max(1, limit // 2)
    return sorted({*steps[:half], *(steps[half - limit :] if limit > half else ()), *([keep] if keep in steps else [])})


def _some(steps: list[int], limit: int) -> str:
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
        blind = run.blind_steps()
        in_columns = bool(run.columns.steps)
        report, verdicts, _ = (diagnose_run(run.path), [], False) if in_columns else _measure(recorded, steps, blind)
        document = build(report)
        step, grid = shown_step(report), None
        shown = next((verdict for verdict in verdicts if verdict.context.step == step), None)
        if shown is not None:
            grid = param_grid(shown, tolerance(report))
    except Exception as error:  # whatever the other run holds, this one is still shown
        return OtherRun(path, problem=words(error))
    return OtherRun(path, document.title, report, document, grid)

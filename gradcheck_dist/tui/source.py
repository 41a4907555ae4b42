"""Where snapshots come from: a thread that tails a run folder, judges whole steps and hands over what changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Protocol

from gradcheck_dist.tui.output import LOG_NAME
from gradcheck_dist.tui.snapshot import OtherRun, Snapshot

if TYPE_CHECKING:
    from gradcheck_dist.tui.judge import Judge, Judged
    from gradcheck_dist.tui.live_run import LiveRun
    from gradcheck_dist.tui.snapshot import Phase

POLL_S = 1 / 30
IDLE_POLL_S = 0.25
READ_POLL_S = 0.02
SWITCH_S = 0.001
"""How long a thread may keep the interpreter: reading and drawing wait for the judging thread that often."""
SIBLINGS_S = 5.0
MOST_NAMED = 6


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
        self._output = False
        self._judge: Judge | None = None
        self._beside: tuple[float, tuple[str, ...]] = (float("-inf"), ())

    def stop(self) -> None:
        self._stopped.set()
        if self._judge is not None:
            self._judge.stop()
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
            from gradcheck_dist.tui.judge import words

            yield Snapshot(str(self.path), "error", words(error))
            self._stopped.wait()

    def _watch(self) -> Iterator[Snapshot]:
        # Here and not above: the first frame must not wait for numpy.
        from gradcheck_dist.tui.live_run import LiveRun

        sys.setswitchinterval(SWITCH_S)
        path = choose_run(self.path)
        run = LiveRun(path, self._clock)
        loaded: list[Judge] = []

        def load() -> None:
            """The engine takes longer to load than the ranks take to be on the screen: they do not wait for it."""
            from gradcheck_dist.tui.judge import Judge

            loaded.append(Judge(run, self._asked.set))
            self._asked.set()

        last: tuple[object, ...] | None = None
        while not self._stopped.is_set():
            changed = run.poll()
            self._asked.clear()
            if last is None:
                Thread(target=load, name="gradcheck-load", daemon=True).start()
            self._judge = loaded[0] if loaded else None
            snapshot = self._snapshot(run, self._judge)
            told = (
                snapshot.phase,
                snapshot.message,
                snapshot.loading,
                snapshot.live,
                snapshot.ranks,
                snapshot.has_output,
            )
            shown = (told, snapshot.num_events, *map(id, (snapshot.report, snapshot.step, snapshot.other)))
            if shown != last:
                last = shown
                yield snapshot
            self._asked.wait(READ_POLL_S if snapshot.loading else POLL_S if changed else IDLE_POLL_S)

    def _snapshot(self, run: LiveRun, judge: Judge | None) -> Snapshot:
        lines = run.lines()
        num_events, num_bytes = run.counts()
        judged = None
        if judge is not None:
            judge.look(self._wanted_step)
            judged = judge.now
        self._load_other(run.path, judged)
        doing = "loading the engine" if judge is None else judge.doing
        loading = " and ".join(words for words in (_reading(run), doing) if words)
        phase, message = _phase(run, [line.detail for line in lines if line.state == "unreadable"], loading)
        if judged is not None and judged.problem:
            phase, message = "error", judged.problem
        elif judged is not None and judged.report is not None:
            phase, message = "ready", ""
        return Snapshot(
            path=str(run.path),
            phase=phase,
            message=message,
            loading=loading,
            live=run.live,
            ranks=lines,
            world_size=len(lines),
            last_step=run.last_step,
            recorded=judged.recorded if judged is not None else (),
            judged=judged.judged if judged is not None else (),
            report=judged.report if judged is not None else None,
            document=judged.document if judged is not None else None,
            step=judged.step if judged is not None else None,
            grid=judged.grid if judged is not None else None,
            series=run.series(judged.norms if judged is not None else {}),
            siblings=self._siblings(run.path),
            other=self._other,
            num_events=num_events,
            num_bytes=num_bytes,
            has_output=self._has_output(run.path),
        )

    def _siblings(self, path: Path) -> tuple[str, ...]:
        """Looked for every few seconds only: the folder above may hold many."""
        now = time.monotonic()
        if now - self._beside[0] > SIBLINGS_S:
            self._beside = (now, siblings(path))
        return self._beside[1]

    def _has_output(self, path: Path) -> bool:
        self._output = self._output or (path / LOG_NAME).is_file()
        return self._output

    def _load_other(self, path: Path, judged: Judged | None) -> None:
        if judged is None or judged.report is None:
            return
        if self._wanted_other is None and self._other is None and judged.report.run.scenario:
            others = [Path(one) for one in siblings(path)]
            fixed = [one for one in others if "fix" in one.name or "good" in one.name]
            self._wanted_other = str((fixed or others)[0]) if others else None
        if self._wanted_other is not None and (self._other is None or self._other.path != self._wanted_other):
            from gradcheck_dist.tui.judge import read_other

            self._other = read_other(self._wanted_other)


def _reading(run: LiveRun) -> str:
    share = run.share_read
    return f"reading, {share:.0%} of {run.counts()[1] / 1e6:,.0f} MB" if share < 1.0 else ""


def _phase(run: LiveRun, lines_trouble: list[str], loading: str) -> tuple[Phase, str]:
    if not run.path.exists():
        return "waiting", f"There is no folder {run.path} yet. This screen goes on as soon as a rank writes into it."
    if not run.path.is_dir():
        return "error", f"{run.path} is a file, not a run folder. Name the folder in which it lies."
    if not run.num_files:
        return "waiting", (
            f"No rank has written into {run.path} yet. While a training starts, just wait: this screen goes on by "
            "itself. Otherwise name a folder that `gradcheck run --out` or `scenario --keep` wrote."
        )
    if len(lines_trouble) == run.num_files:
        return "error", "No trace in this folder can be read. " + " ".join(lines_trouble[:3])
    if loading:
        return "reading", f"No verdict yet: {loading}."
    if run.live:
        return "recording", "Recording. The first verdict comes with the first whole optimizer step."
    return "waiting", (
        "The ranks wrote no whole record before they stopped: there is nothing to judge yet. If they still run, this "
        "screen goes on by itself."
    )


def choose_run(path: Path) -> Path:
    """The folder itself, or, when it holds only run folders (variants of a scenario), the one to look at first."""
    from gradcheck_dist.trace.run import trace_files

    if not path.is_dir() or trace_files(path):
        return path
    inside = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and trace_files(entry)][:64]
    healthy = [entry for entry in inside if "fix" in entry.name or "good" in entry.name]
    return next((entry for entry in inside if entry not in healthy), inside[0] if inside else path)


def others_inside(path: Path) -> str:
    """Which of the runs in a folder is looked at, and which others it holds; empty where it is a run itself."""
    chosen = choose_run(path)
    others = [Path(one).name for one in siblings(chosen)] if chosen != path else []
    if not others:
        return ""
    named = f"{', '.join(others[:MOST_NAMED])}{', …' * (len(others) > MOST_NAMED)}"
    return f"{path} holds {len(others) + 1} runs. This is {chosen.name}; beside it (6 compares): {named}."


def siblings(path: Path) -> tuple[str, ...]:
    """Other run folders beside this one."""
    from gradcheck_dist.trace.run import trace_files

    try:
        beside = sorted(entry for entry in path.resolve().parent.iterdir() if entry.is_dir())[:64]
        return tuple(str(entry) for entry in beside if entry != path.resolve() and trace_files(entry))
    except OSError:
        return ()

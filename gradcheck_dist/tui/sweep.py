"""A whole run judged in a process of its own: the screens' process only hears how far it is and what was found.

python -m gradcheck_dist.tui.sweep RUN measured|documented    writes pickled words and results to stdout
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from gradcheck_dist.diagnosis.engine import objective_of
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.stream.cursor import RunCursor
from gradcheck_dist.stream.diagnose import Progress, diagnose_run
from gradcheck_dist.stream.watched import Watched, watch_run

NICE = 10


class Sweep:
    """`documented`: recorded operations are compared, nothing is measured.

    `progress` says in words how far it is; `report` or `watched` is the newest result, `version` their number. `wake`
    is called when there is something new.
    """

    def __init__(self, path: Path, wake: Callable[[], None], *, documented: bool) -> None:
        self.documented = documented
        self.progress = "judging all steps"
        self.report: Report | None = None
        self.watched: Watched | None = None
        self.problem = ""
        self.version = 0
        self.done = False
        self._wake = wake
        command = [sys.executable, "-m", __name__, str(path), "documented" if documented else "measured"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        threading.Thread(target=self._listen, name="gradcheck-sweep", daemon=True).start()

    def _listen(self) -> None:
        """What the process says, which is one of ours: nothing of a trace is unpickled."""
        assert self._process.stdout is not None
        problem = "the process that judged all steps ended before its time"
        with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError), self._process.stdout as pipe:
            while (said := pickle.load(pipe)) is not None:
                if isinstance(said, str):
                    self.progress = said
                elif isinstance(said, GradcheckError):
                    self.problem = str(said)
                elif isinstance(said, Report):
                    self.report = said
                    self.version += 1
                else:
                    self.watched = said
                    self.version += 1
                self._wake()
            problem = ""
        self.problem = self.problem or problem
        self._process.wait()
        self.done = True
        self.version += 1
        self._wake()

    def stop(self) -> None:
        """End the process if it still runs."""
        self._process.terminate()


def main(path: str, kind: str) -> None:
    """Judge a run and say how it goes."""

    def say(said: object) -> None:
        pickle.dump(said, sys.stdout.buffer)
        sys.stdout.buffer.flush()

    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        with contextlib.suppress(OSError, AttributeError):
            os.nice(NICE)
        try:
            (_compare if kind == "documented" else _measure)(path, say)
        except GradcheckError as error:
            say(error)
        say(None)


def _measure(path: str, say: Callable[[object], None]) -> None:
    def told(progress: Progress) -> None:
        say(f"judging all steps: {progress}")

    say(diagnose_run(path, progress=told, early=say))


def _compare(path: str, say: Callable[[object], None]) -> None:
    run = RunCursor(path).run
    objective, _ = objective_of(run, None)

    def told(step: int, num_judged: int, num_off: int, share: float) -> None:
        off = f", {num_off} off" if num_off else ""
        say(f"comparing all steps: step {step}, {num_judged} in all{off}, {share:.0%} of the run read")

    say(watch_run(run, objective, told=told, plain=True, early=say))


if __name__ == "__main__":
    main(*sys.argv[1:3])

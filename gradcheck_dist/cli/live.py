"""`gradcheck run --live`: the screens in the terminal, the command beside them, its output in a log."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradcheck_dist.cli import child
from gradcheck_dist.cli.places import quoted
from gradcheck_dist.errors import GradcheckError

if TYPE_CHECKING:
    from gradcheck_dist.tui.app import WatchApp

POLL_S = 0.1


def check_terminal(option: str = "--live") -> None:
    """E752 when the screens have no terminal: before anything is started."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise GradcheckError(
            f"{option} needs a terminal, and stdin or stderr is none. Leave {option} out; `gradcheck watch RUN` opens "
            "the same screens over a run folder in any terminal, at any time.",
            code="E752",
        )


def open_screens(folder: Path) -> None:
    """The screens over a folder of runs, until they are closed."""
    from gradcheck_dist.tui.app import WatchApp
    from gradcheck_dist.tui.source import FolderSource

    WatchApp(FolderSource(folder), str(folder)).run()


def run_beside(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> int:
    """Run `command` with the screens over `folder` in front; its exit code, when it has ended.

    The command's stdin is empty and its output goes to folder/output.log. When the screens close, what it wrote is
    printed, and what it goes on writing. Signals sent to this process reach it throughout; those that end a process
    close the screens too.
    """
    from gradcheck_dist.tui.app import WatchApp
    from gradcheck_dist.tui.output import LOG_NAME
    from gradcheck_dist.tui.source import FolderSource

    log = folder / LOG_NAME
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with log.open("wb") as output, child.started(command, environment, stdout=output, **streams) as running:
        app = WatchApp(FolderSource(folder), str(folder))
        closed = threading.Event()
        with _closed_by_signals(app):
            threading.Thread(target=_tell, args=(running, app, closed), daemon=True).start()
            try:
                app.run()
            except Exception as error:  # the screens are ours, the command is the user's
                _say(f"the screens broke ({error}); the command goes on")
            finally:
                closed.set()
        if running.poll() is None:
            again = f"gradcheck watch {quoted(folder)}"
            _say(f"the screens are closed, the command goes on; Ctrl-C interrupts it. Again: {again}")
        with contextlib.suppress(OSError):  # the terminal is gone, or nobody reads on
            _print_until_end(running, log)
        return child.exit_code(running.wait())


@contextlib.contextmanager
def _closed_by_signals(app: WatchApp) -> Iterator[None]:
    """While open, a signal that asks us to end is passed on as before, and closes the screens."""
    before: dict[int, Any] = {}

    def close(number: int, frame: Any) -> None:
        if callable(before[number]):
            before[number](number, frame)
        app.exit()

    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) != signal.SIG_IGN:
            before[ending] = signal.signal(ending, close)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(running: subprocess.Popen[bytes], app: WatchApp, closed: threading.Event) -> None:
    """Tell the screens when the command ends, which may be before they are there."""
    code = child.exit_code(running.wait())
    while not closed.is_set():
        try:
            app.call_from_thread(app.command_ended, code)
            return
        except RuntimeError:  # not running yet, or not any more
            closed.wait(POLL_S)


def _print_until_end(running: subprocess.Popen[bytes], log: Path) -> None:
    """The log to stdout, from its first byte on, as long as the command writes."""
    with log.open("rb") as file:
        while True:
            ended = running.poll() is not None
            while data := file.read(1 << 16):
                sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            if ended:
                return
            time.sleep(POLL_S)


def _say(message: str) -> None:
    print(f"gradcheck: {message}", file=sys.stderr, flush=True)

"""What a command is doing, on stderr, when it takes longer than a second and somebody looks on."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

DELAY_S = 1.0


class Progress:
    """A spinner with the present task beside it. Silent on pipes, and for the first second."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._status: Status | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(DELAY_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            if self._status is not None:
                self._status.stop()
                self._status = None
            self._timer.finished.set()

    def update(self, task: str) -> None:
        """Say what is being done now."""
        with self._lock:
            self._task = task
            if self._status is not None:
                self._status.update(_text(task))

    def say(self, line: str) -> None:
        """A line of the result on stdout, which may be the terminal that the spinner turns on."""
        with self._lock:
            if self._status is not None:
                self._status.stop()
            print(line, flush=True)
            if self._status is not None:
                self._status.start()

    def _show(self) -> None:
        from rich.console import Console

        with self._lock:
            if not self._timer.finished.is_set():
                self._status = Console(stderr=True).status(_text(self._task))
                self._status.start()


def _text(task: str) -> str:
    from rich.markup import escape

    return escape(task)

"""How far something long has come: a bar in a notebook, or on stderr where somebody looks on; nothing in a pipe.

It comes when the work takes longer than a second, and goes with it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

DELAY_S = 1.0
INTERVAL_S = 0.2

Say = Callable[[float, str], None]
"""Takes the share that is done, from 0 to 1, and in a few words what was done."""


@contextmanager
def progress_bar(task: str) -> Iterator[Say]:
    """Somewhere to say how far `task` has come, as often as one likes."""
    bar = _make(task)
    next_s = time.monotonic() + DELAY_S

    def say(share: float, text: str) -> None:
        nonlocal next_s
        if bar is not None and time.monotonic() >= next_s:
            next_s = time.monotonic() + INTERVAL_S
            bar.show(min(max(share, 0.0), 1.0), text)

    try:
        yield say
    finally:
        if bar is not None:
            bar.close()


def _make(task: str) -> _Notebook | _Terminal | None:
    # Whoever runs a notebook has loaded IPython; nobody else pays for it.
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and getattr(shell, "kernel", None) is not None:
        return _Notebook(task, ipython.display)
    return _Terminal(task) if sys.stderr.isatty() else None


class _Notebook:
    """An output of the cell that is written over, and empty at the end: other outputs stay."""

    def __init__(self, task: str, display: Any) -> None:
        self._task, self._display = task, display
        self._handle: Any = None

    def show(self, share: float, text: str) -> None:
        page = self._display.HTML(
            f'<progress max="1" value="{share:.3f}" style="width:16em"></progress> {escape(f"{self._task}: {text}")}'
        )
        if self._handle is None:
            self._handle = self._display.display(page, display_id=True)
        else:
            self._handle.update(page)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


class _Terminal:
    """One line on stderr."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._progress: Any = None

    def show(self, share: float, text: str) -> None:
        from rich.console import Console
        from rich.markup import escape as inert
        from rich.progress import Progress

        if self._progress is None:
            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.start()
            self._bar = self._progress.add_task(inert(self._task), total=1.0)
        self._progress.update(self._bar, completed=share, description=inert(f"{self._task}: {text}"))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

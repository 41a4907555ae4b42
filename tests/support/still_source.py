"""A source for screens that stands still: it gives the snapshots it was made with, and remembers what was asked."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from textual.app import App

from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.tui.source import FolderSource


class StillSource:
    """Gives its snapshots one after the other and then nothing until it is stopped."""

    def __init__(self, *snapshots: Snapshot) -> None:
        self._snapshots = snapshots
        self._stopped = threading.Event()
        self.asked_step: list[int | None] = []
        self.asked_other: list[str] = []

    def snapshots(self) -> Iterator[Snapshot]:
        yield from self._snapshots
        self._stopped.wait(60)

    def stop(self) -> None:
        self._stopped.set()

    def show_step(self, step: int | None) -> None:
        self.asked_step.append(step)

    def compare_with(self, path: str) -> None:
        self.asked_other.append(path)


def first_snapshot(folder: Path, *, step: int | None = None, compare: Path | None = None) -> Snapshot:
    """What a folder shows once all is read and judged."""
    source = FolderSource(folder, compare=compare)
    if step is not None:
        source.show_step(step)
    snapshot = next(one for one in source.snapshots() if settled(one))
    source.stop()
    return snapshot


def settled(snapshot: Snapshot) -> bool:
    """Nothing is being read or judged any more."""
    return not snapshot.loading and snapshot.phase != "reading"


def screen_text(app: App[None]) -> str:
    """The screen as text, one line a row."""
    width, height = app.size
    console = Console(width=width, height=height, file=io.StringIO(), record=True, legacy_windows=False)
    console.print(app.screen._compositor.render_update(full=True))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())

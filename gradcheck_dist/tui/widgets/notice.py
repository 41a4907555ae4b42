"""What stands in place of a screen that has nothing to show yet, or never."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from gradcheck_dist.reports.text import prose
from gradcheck_dist.tui.snapshot import Snapshot

_TITLES = {
    "reading": "Reading",
    "waiting": "Waiting for a trace",
    "recording": "Recording",
    "ready": "Nothing to show",
    "error": "This cannot be shown",
}


class Notice(Static):
    """A boxed sentence."""

    DEFAULT_CSS = """
    Notice { height: auto; margin: 1 2; padding: 1 2; border: round $primary; display: none; }
    Notice.error { border: heavy $error; }
    """

    def show(self, snapshot: Snapshot, words: str = "") -> None:
        self.border_title = _TITLES[snapshot.phase]
        self.set_class(snapshot.phase == "error", "error")
        self.update(Text(words or prose(snapshot.message) or f"Reading {prose(snapshot.path)} …"))

"""Verdict, where, next, why: the box that stands before any table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text
from textual.content import Content
from textual.widgets import Static

from gradcheck_dist.reports.document import Document
from gradcheck_dist.reports.text import prose
from gradcheck_dist.tui.snapshot import Snapshot


class VerdictBox(Static):
    """The report's first words."""

    DEFAULT_CSS = """
    VerdictBox { height: auto; border: round $primary; padding: 0 1; }
    VerdictBox.findings { border: heavy $error; }
    VerdictBox.clean { border: round $success; }
    VerdictBox.undetermined { border: round $warning; }
    """

    _told: object = None
    """What stands in the box: drawing it again costs a layout of the whole screen."""

    def show(self, snapshot: Snapshot) -> None:
        """Show a snapshot's document, or what it waits for."""
        if snapshot.document is not None:
            self.show_document(snapshot.document)
            return
        if self._told == snapshot.message:
            return
        self._told = snapshot.message
        self.border_title = "no verdict yet"
        self.set_classes(["undetermined"])
        words = prose(snapshot.message) or f"Reading {prose(snapshot.path)} …"
        self.update(_grid([("verdict", Text("none yet", "bold")), ("why", Text(words))]))

    def show_document(self, document: Document, *, brief: bool = False) -> None:
        """`brief`: without the next step, for two boxes side by side."""
        if self._told is document:
            return
        self._told = document
        self.border_title = Content(document.title)
        self.set_classes([document.verdict])
        rows = [("verdict", Text(document.headline, "bold"))]
        # Why comes last: on a small terminal the box is cut at its foot.
        for label, text in sorted(document.answer, key=lambda row: row[0] == "why"):
            if not (brief and label == "next"):
                rows.append((label, Text(text, "bold" if label == "where" else "")))
        self.update(_grid(rows))


def _grid(rows: list[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid

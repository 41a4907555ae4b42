"""Verdict, where, next, why: the box that stands before any table."""

from __future__ import annotations

from textwrap import wrap

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

    _rows: tuple[tuple[str, Text], ...] = ()
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
        self._say([("verdict", Text("none yet", "bold")), ("why", Text(words))])

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
        self._say(rows)

    def _say(self, rows: list[tuple[str, Text]]) -> None:
        self._rows = tuple(rows)
        self.update(_grid(rows))
        self.on_resize()

    def on_resize(self) -> None:
        """Say so at the foot where the box is lower than its words."""
        width, height = self.content_size
        room = max(1, width - 1 - max((len(label) for label, _ in self._rows), default=0))
        lines = sum(max(1, len(wrap(text.plain, room, break_on_hyphens=False))) for _, text in self._rows)
        explained = isinstance(self._told, Document) and not self.has_class("clean")
        rest = "cut here: 7 shows all" if explained else "cut here"
        self.border_subtitle = rest if height and lines > height else ""


def _grid(rows: list[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid

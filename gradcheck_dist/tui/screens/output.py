"""What the command printed, over the screen in front."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from gradcheck_dist.tui.output import Output
from gradcheck_dist.tui.widgets.rows import Piece, Rows

REFRESH_S = 0.25


class OutputRows(Rows):
    """The lines; the cursor stays at the end while it is there."""

    def __init__(self, output: Output) -> None:
        super().__init__(classes="main")
        self._output = output

    def read_on(self) -> None:
        at_end = self.cursor >= self.count - 1
        if self._output.poll():
            self.count = len(self._output.lines)
            if at_end:
                self.cursor = self.count - 1
            self.refresh()

    def pieces(self, index: int) -> Iterable[Piece]:
        lines = self._output.lines
        yield lines[index] if index < len(lines) else "", "plain"

    def empty(self) -> str:
        return "the command has printed nothing yet"


class OutputScreen(ModalScreen[None]):
    """Closes with escape, q or ctrl+o."""

    DEFAULT_CSS = """
    OutputScreen { align: center middle; }
    OutputScreen Vertical { width: 95%; height: 90%; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,ctrl+o", "dismiss", "Close")]

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._output = Output(path)

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "output of the command"
            yield OutputRows(self._output)

    def on_mount(self) -> None:
        rows = self.query_one(OutputRows)
        rows.read_on()
        self.set_interval(REFRESH_S, rows.read_on)

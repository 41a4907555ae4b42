"""The weights of a step as a map: contributions across, units or ranks down, colour and sign for the ratio."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.reactive import reactive

from gradcheck_dist.tui import scale
from gradcheck_dist.tui.grid import Slice
from gradcheck_dist.tui.widgets.rows import Piece, Rows, fit, middle

NUMBER_WIDTH, SIGN_WIDTH = 8, 4


class Heatmap(Rows):
    """A cursor on a cell; only the cells in view are drawn."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move_column(-1)", "Left", show=False),
        Binding("right", "move_column(1)", "Right", show=False),
    ]

    column = reactive(0)
    numbers = reactive(True)
    part: Slice | None = None
    axes = ("", "")
    """What rows and columns are, for the corner."""
    _first = 0
    _longest_row = 8
    _longest_column = 2

    def show(self, part: Slice) -> None:
        self.part = part
        self._longest_row = max(map(len, part.row_labels), default=8)
        self._longest_column = max((len(line) for label in part.column_labels for line in label.split(" ")), default=2)
        self.header_rows = max((len(label.split(" ")) for label in part.column_labels), default=1)
        self.count = part.shape[0]
        self.watch_count()
        self.column = min(self.column, max(part.shape[1] - 1, 0))
        self.show_column()
        self.refresh()

    @property
    def cell_width(self) -> int:
        return NUMBER_WIDTH if self.numbers else max(SIGN_WIDTH, 1 + self._longest_column)

    @property
    def label_width(self) -> int:
        longest = max(self._longest_row + 2, len(self.axes[1]) + 3)
        return max(18, min(longest, self._size.width * 2 // 5))

    @property
    def num_visible(self) -> int:
        return max(1, (self._size.width - self.label_width) // self.cell_width)

    def validate_column(self, column: int) -> int:
        return max(0, min(column, (self.part.shape[1] if self.part else 1) - 1))

    def watch_column(self) -> None:
        first = self._first
        self.show_column()
        if first != self._first:
            self.refresh()
        else:
            self.refresh(Region(0, 0, self._size.width, self.header_rows))
            self.refresh_rows(self.cursor)

    def watch_numbers(self) -> None:
        self.show_column()
        self.refresh()

    def show_column(self) -> None:
        self._first = max(min(self._first, self.column), self.column - self.num_visible + 1)

    def on_resize(self) -> None:
        # What was drawn while the map had no size yet, of a screen that waited, began at the cursor.
        self._first = 0
        self.show_column()
        self.refresh()

    def action_move_column(self, by: int) -> None:
        self.column += by

    def on_click(self, event: events.Click) -> None:
        if self.part is not None and event.x >= self.label_width:
            self.column = self._first + (event.x - self.label_width) // self.cell_width
        super().on_click(event)

    def _columns(self) -> range:
        num = self.part.shape[1] if self.part is not None else 0
        return range(self._first, min(num, self._first + self.num_visible))

    def header(self, row: int) -> Iterable[Piece]:
        assert self.part is not None or self.count == 0
        more = f"« {self._first} more" if self._first else f"{self.axes[1]} →"
        last = row == self.header_rows - 1
        yield fit(f"{self.axes[0]} ↓" if last and row else more if row == 0 else "", self.label_width), "dim"
        previous = None
        behind = (self.part.shape[1] if self.part else 0) - self._columns().stop
        note = f" {behind} more »" if behind > 0 and row == 0 else ""
        room = self._size.width - self.label_width - len(note)
        for column in self._columns():
            lines = self.part.column_labels[column].split(" ")  # type: ignore[union-attr]
            line = lines[row] if row < len(lines) else ""
            # The data rank stands over its first contribution only: groups are seen at a glance.
            shown = "" if row == 0 and len(lines) > 1 and line == previous else line
            previous = line
            here = column == self.column
            width = min(self.cell_width, room)
            room -= width
            if width > 0:
                yield fit(f" {shown if not here else line}", width), "accent" if here else "head"
        if note:
            yield note, "dim"

    def pieces(self, index: int) -> Iterable[Piece]:
        part = self.part
        if part is None:
            return
        here_row = index == self.cursor
        yield middle(part.row_labels[index], self.label_width - 1) + " ", "bold" if here_row else "plain"
        here = self.column if here_row else -1
        width, numbers, tolerance = self.cell_width, self.numbers, part.grid.tolerance
        for column in self._columns():
            ratio = part.ratio(index, column)
            body, style = _cell(ratio, abs(ratio - 1.0) <= tolerance, width, numbers)
            if column == here:
                yield _chosen(body), style + Style(bold=True, underline=True)
            else:
                yield body, style
            yield " ", "plain"

    def empty(self) -> str:
        if self.axes[0].endswith("filtered"):
            return "nothing here contains what is searched for; esc ends the search"
        return "no weight of this step could be observed; the Parameters screen (5) says why"


@lru_cache(maxsize=4096)
def _cell(ratio: float, right: bool, width: int, numbers: bool) -> tuple[str, Style]:
    """A cell without the gap behind it."""
    sign = scale.sign(ratio, right)
    body = f" {sign} {scale.brief(ratio, width - 4)}" if numbers else f" {sign}"
    return body.ljust(width - 1), scale.style(ratio, right)


def _chosen(body: str) -> str:
    """A cell in brackets; a number that fills it moves up to its sign."""
    return f"[{body[1:-1]}]" if body.endswith(" ") else f"[{body[1]}{body[3:]}]"

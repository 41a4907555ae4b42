"""A list of any length, drawn line by line: only what is seen is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from gradcheck_dist.reports.text import printable

Piece = tuple[str, str | Style]
"""Text and how it looks: the name of a component class ("bad", "dim", ...) or a style."""

LOOKS = ("plain", "dim", "good", "bad", "warn", "accent", "head", "bold")


class Rows(ScrollView, can_focus=True):
    """Base of all lists. A subclass tells `count` and makes the pieces of one row; the cursor is here."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"rows--{look}" for look in LOOKS} | {"rows--cursor"}
    DEFAULT_CSS = """
    Rows { height: 1fr; background: $background; scrollbar-size-vertical: 1; overflow-x: hidden; }
    Rows .rows--plain { color: $foreground; }
    Rows .rows--dim { color: $foreground 60%; }
    Rows .rows--good { color: $success; }
    Rows .rows--bad { color: $error; text-style: bold; }
    Rows .rows--warn { color: $warning; }
    Rows .rows--accent { color: $accent; }
    Rows .rows--head { color: $primary; text-style: bold; }
    Rows .rows--bold { color: $foreground; text-style: bold; }
    Rows .rows--cursor { background: $primary 35%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "edge(0)", "First", show=False),
        Binding("end", "edge(1)", "Last", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]

    count = reactive(0)
    cursor = reactive(0)
    header_rows = 0
    """Rows at the top that stay in place."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        self._looks: dict[tuple[Style, str | Style], Style] = {}
        super().__init__(id=id, classes=classes)

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, rows: Rows, index: int) -> None:
            super().__init__()
            self.rows, self.index = rows, index

        @property
        def control(self) -> Rows:
            return self.rows

    class Chosen(Moved):
        """A row was entered or clicked twice."""

    def pieces(self, index: int) -> Iterable[Piece]:
        """One row."""
        raise NotImplementedError

    def header(self, row: int) -> Iterable[Piece]:
        """One of the rows that stay at the top."""
        return ()

    def empty(self) -> str:
        """What stands there when there is nothing."""
        return ""

    def on_mount(self) -> None:
        super().on_mount()  # type: ignore[no-untyped-call]
        self.watch_count()

    def notify_style_update(self) -> None:
        self._looks.clear()
        super().notify_style_update()

    def look(self, name: str | Style) -> Style:
        return name if isinstance(name, Style) else self.get_component_rich_style(f"rows--{name}", partial=True)

    def watch_count(self) -> None:
        self.virtual_size = Size(0, self.count + self.header_rows)
        self.cursor = max(0, min(self.cursor, self.count - 1))
        self.refresh()

    def validate_cursor(self, cursor: int) -> int:
        return max(0, min(cursor, self.count - 1))

    def watch_cursor(self, old: int, new: int) -> None:
        if old != new:
            self.show_cursor()
            self.refresh()
            self.post_message(self.Moved(self, new))

    def show_cursor(self) -> None:
        """Scroll as far as needed to see the cursor."""
        height = max(1, self.size.height - self.header_rows)
        top = round(self.scroll_y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)

    def action_move(self, by: int) -> None:
        self.cursor += by

    def action_page(self, by: int) -> None:
        self.cursor += by * max(1, self.size.height - self.header_rows - 1)

    def action_edge(self, last: int) -> None:
        self.cursor = self.count - 1 if last else 0

    def action_choose(self) -> None:
        if self.count:
            self.post_message(self.Chosen(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        row = event.y - self.header_rows
        if row >= 0 and row + round(self.scroll_y) < self.count:
            index = row + round(self.scroll_y)
            again = index == self.cursor
            self.cursor = index
            if again or event.chain > 1:
                self.action_choose()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        if y < self.header_rows:
            return self._strip(self.header(y), width, base)
        index = y - self.header_rows + round(self.scroll_y)
        if index >= self.count:
            text = self.empty() if index == 0 or (self.count == 0 and y == self.header_rows) else ""
            return self._strip([(text, "dim")] if text else (), width, base)
        if index == self.cursor:
            base += self.get_component_rich_style("rows--cursor")
        return self._strip(self.pieces(index), width, base)

    def _strip(self, pieces: Iterable[Piece], width: int, base: Style) -> Strip:
        segments, known = [], self._looks
        for text, look in pieces:
            style = known.get((base, look))
            if style is None:
                style = known[base, look] = base + self.look(look)
            segments.append(Segment(text if text.isprintable() and text.isascii() else printable(text), style))
        return Strip(segments).adjust_cell_length(width, base).crop(0, width)

    def refresh_cursor_line(self) -> None:
        self.refresh(Region(0, self.cursor - round(self.scroll_y) + self.header_rows, self.size.width, 1))


def fit(text: str, width: int, align: str = "left") -> str:
    """Text in exactly `width` cells, cut with an ellipsis."""
    text = printable(text)
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…" if width > 1 else set_cell_size(text, max(width, 0))
    return text + " " * (width - length) if align == "left" else " " * (width - length) + text


def middle(text: str, width: int) -> str:
    """Text in exactly `width` cells, cut in the middle: both ends of a parameter's name matter."""
    text = printable(text)
    if cell_len(text) <= width or width < 5:
        return fit(text, width)
    left = (width - 1) // 2
    return fit(text[:left] + "…" + text[-(width - 1 - left) :], width)

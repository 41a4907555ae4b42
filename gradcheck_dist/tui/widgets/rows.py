"""A list of any length, drawn line by line: only what is seen is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.filter import ANSIToTruecolor, DimFilter
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollBar
from textual.strip import Strip

from gradcheck_dist.reports.text import printable
from gradcheck_dist.tui.widgets.light_scrollbar import LightScrollBar

Piece = tuple[str, str | Style]
"""Text and how it looks: the name of a component class ("bad", "dim", ...) or a style."""

MAX_MADE = 4096
"""Pieces that are kept ready to be drawn again: most rows look like their neighbours."""

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
        self._drawn: dict[int, Strip] = {}
        self._drawn_size = Size(0, 0)
        self._made: dict[Style, dict[Piece, tuple[Segment, int]]] = {}
        super().__init__(id=id, classes=classes)

    @property
    def vertical_scrollbar(self) -> ScrollBar:
        """One that is cheap to draw beside every frame of a scroll."""
        if self._vertical_scrollbar is None:
            bar = self._vertical_scrollbar = LightScrollBar(name="vertical", thickness=self.scrollbar_size_vertical)
            bar.display = False
            self.app._start_widget(self, bar)
        return self._vertical_scrollbar

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

    def on_resize(self) -> None:
        self.show_cursor()

    def notify_style_update(self) -> None:
        self._made.clear()
        self._drawn.clear()
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
            self.refresh_rows(old, new)
            self.post_message(self.Moved(self, new))

    def show_cursor(self) -> None:
        """Scroll as far as needed to see the cursor."""
        height = max(1, self._size.height - self.header_rows)
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

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines in view, past Textual's cache of decorated lines: a list has no border and no padding."""
        if self._drawn_size != self._size:
            self._drawn_size = self._size
            self._drawn.clear()
        if not self._drawn.keys() >= set(crop.line_range):
            self._draw([y for y in crop.line_range if y not in self._drawn])
        strips = [self._drawn[y] for y in crop.line_range]
        if crop.x > 0 or crop.right < self._size.width:
            strips = [strip.crop(*crop.column_span) for strip in strips]
        return strips

    def _draw(self, lines: Iterable[int]) -> None:
        width, top, header_rows = self._size.width, round(self.scroll_y), self.header_rows
        count, cursor = self.count, self.cursor
        base, background = self.rich_style, self.background_colors[1]
        # No look of a list uses the terminal's own "dim" or its sixteen colours.
        filters = [one for one in self.get_line_filters() if not isinstance(one, DimFilter | ANSIToTruecolor)]
        under = base + self.get_component_rich_style("rows--cursor")
        for y in lines:
            index = y - header_rows + top
            if y < header_rows:
                strip = self._strip(self.header(y), width, base)
            elif index < count:
                strip = self._strip(self.pieces(index), width, under if index == cursor else base)
            else:
                words = self.empty() if y == header_rows and not count else ""
                strip = self._strip([(words, "dim")] if words else (), width, base)
            for line_filter in filters:
                strip = strip.apply_filter(line_filter, background)
            self._drawn[y] = strip

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        """Lines that are refreshed are drawn again; the others stay as they are."""
        if regions:
            for region in regions:
                for y in region.line_range:
                    self._drawn.pop(y, None)
        else:
            self._drawn.clear()
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)

    def _strip(self, pieces: Iterable[Piece], width: int, base: Style) -> Strip:
        segments, known, length = [], self._made.setdefault(base, {}), 0
        if len(known) > MAX_MADE:
            known.clear()
        for piece in pieces:
            made = known.get(piece)
            if made is None:
                text, look = piece
                shown = text if text.isprintable() and text.isascii() else printable(text)
                made = known[piece] = (Segment(shown, base + self.look(look)), cell_len(shown))
            segments.append(made[0])
            length += made[1]
        if length <= width:
            if length < width:
                segments.append(Segment(" " * (width - length), base))
            return Strip(segments, width)
        return Strip(segments, length).adjust_cell_length(width, base)

    def refresh_rows(self, *indices: int) -> None:
        """Draw only these rows again, as far as they are in view."""
        top, height = round(self.scroll_y), self._size.height
        for index in indices:
            y = index - top + self.header_rows
            if self.header_rows <= y < height:
                self.refresh(Region(0, y, self._size.width, 1))


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

"""The schedule of a step: a lane a rank (and stage), time across, one bar or letter an event."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar

from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.message import Message
from textual.reactive import reactive

from gradcheck_dist.tui.lanes import OTHER, Lane, Mark
from gradcheck_dist.tui.step_view import StepView
from gradcheck_dist.tui.widgets.rows import Piece, Rows, fit

LABEL_WIDTH = 16
ORDER_CELL = 4
"""Cells of one event when events are drawn in order and not to scale."""

COLOURS = {
    "F": "#8fb8de",
    "L": "#c9c9c9",
    "B": "#4285c8",
    "R": "#f0a04b",
    "S": "#d9c05a",
    "W": "#d9c05a",
    "U": "#d9c05a",
    "C": "#b48ead",
    "V": "#b48ead",
    "N": "#b48ead",
    "O": "#6cc0a0",
    "Z": "#9a9a9a",
    "P": "#707a88",
    OTHER: "#c9c9c9",
}


class TimelineChart(Rows):
    """`to_scale`: time across; otherwise one event after the other, each of equal width."""

    header_rows = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move_mark(-1)", "Previous event", show=False),
        Binding("right", "move_mark(1)", "Next event", show=False),
        Binding("plus,equals_sign", "zoom(0.5)", "Zoom in", key_display="+"),
        Binding("minus", "zoom(2.0)", "Zoom out", key_display="-"),
        Binding("shift+left,h", "pan(-1)", "Pan left", show=False),
        Binding("shift+right,l", "pan(1)", "Pan right", show=False),
        Binding("0", "fit", "Whole step", show=False),
        Binding("o", "toggle_scale", "Time/order"),
    ]

    to_scale = reactive(True)
    mark: reactive[Mark | None] = reactive(None)
    view: StepView | None = None
    param: tuple[int, str] | None = None
    _untimed = False
    """The last step had no times of single events, so it was drawn in order."""
    _offset = 0.0
    _per_cell = 1.0

    class MarkMoved(Message):
        """Another event is under the cursor."""

        def __init__(self, mark: Mark) -> None:
            super().__init__()
            self.mark = mark

    def show(self, view: StepView, param: tuple[int, str] | None) -> None:
        fresh = self.view is not view
        self.view, self.param = view, param
        self.count = len(view.lanes)
        if fresh:
            if self.to_scale != self._untimed:  # not by the user's own key
                self.to_scale = view.timed
            self._untimed = not view.timed
            self.watch_count()
            self.action_fit()
            known = self.mark is not None and (self.mark.rank, self.mark.seq) in view.marks
            self.mark = view.marks[self.mark.rank, self.mark.seq] if known and self.mark else self._first_mark()
        self.refresh()

    def _first_mark(self) -> Mark | None:
        return next((mark for lane in self.lanes for mark in lane.marks), None)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return self.view.lanes if self.view is not None else ()

    @property
    def plot_width(self) -> int:
        return max(10, self.size.width - LABEL_WIDTH)

    def _span(self) -> float:
        """The whole step in the unit of the axis: ns, or events."""
        if self.to_scale:
            return float(max((mark.end_ns for lane in self.lanes for mark in lane.marks), default=1)) or 1.0
        return float(max((len(lane.marks) for lane in self.lanes), default=1))

    def _place(self, lane: Lane, index: int) -> tuple[float, float]:
        mark = lane.marks[index]
        return (float(mark.start_ns), float(mark.end_ns)) if self.to_scale else (float(index), float(index + 1))

    def action_fit(self) -> None:
        self._offset = 0.0
        self._per_cell = self._span() / (self.plot_width - 1) if self.to_scale else 1.0 / ORDER_CELL
        self.refresh()

    def on_resize(self) -> None:
        self.action_fit()

    def action_toggle_scale(self) -> None:
        self.to_scale = not self.to_scale
        self.action_fit()
        self.show_mark()

    def action_zoom(self, factor: float) -> None:
        centre = self._mark_at()
        at = (centre - self._offset) / self._per_cell
        self._per_cell = max(self._span() / 1e6, min(self._per_cell * factor, self._span() / 4))
        self._offset = max(0.0, centre - at * self._per_cell)
        self.refresh()

    def action_pan(self, by: int) -> None:
        page = self._per_cell * self.plot_width / 4
        self._offset = max(0.0, min(self._offset + by * page, self._span() - page))
        self.refresh()

    def _mark_at(self) -> float:
        lane = self.lanes[self.cursor] if self.lanes else None
        if lane is None or self.mark not in lane.marks:
            return self._offset
        return self._place(lane, lane.marks.index(self.mark))[0]

    def action_move_mark(self, by: int) -> None:
        if not self.lanes:
            return
        marks = self.lanes[self.cursor].marks
        at = marks.index(self.mark) if self.mark in marks else -1
        if marks:
            self.mark = marks[max(0, min(at + by, len(marks) - 1))]

    def watch_cursor(self, old: int, new: int) -> None:
        super().watch_cursor(old, new)
        if old != new and self.lanes and (self.mark is None or self.mark not in self.lanes[new].marks):
            time = self.mark.start_ns if self.mark is not None else 0
            marks = self.lanes[new].marks
            self.mark = min(marks, key=lambda mark: abs(mark.start_ns - time), default=self.mark)

    def watch_mark(self) -> None:
        if self.mark is not None:
            self.show_mark()
            self.post_message(self.MarkMoved(self.mark))
        self.refresh()

    def jump(self, rank: int, seq: int) -> None:
        """Put the cursor on an event."""
        for index, lane in enumerate(self.lanes):
            for mark in lane.marks:
                if (mark.rank, mark.seq) == (rank, seq):
                    self.mark = mark
                    self.cursor = index
                    return

    def show_mark(self) -> None:
        at = self._mark_at()
        if not self._offset <= at < self._offset + self._per_cell * self.plot_width:
            self._offset = max(0.0, at - self._per_cell * self.plot_width / 3)

    def on_click(self, event: events.Click) -> None:
        row = event.y - self.header_rows + round(self.scroll_y)
        if 0 <= row < self.count and event.x >= LABEL_WIDTH:
            time = self._offset + (event.x - LABEL_WIDTH + 0.5) * self._per_cell
            lane = self.lanes[row]
            places = [(self._place(lane, index), mark) for index, mark in enumerate(lane.marks)]
            inside = [(end - start, mark.seq) for (start, end), mark in places if start <= time <= end]
            near = min(inside)[1] if inside else None
            best = min(places, key=lambda place: abs(place[0][0] - time), default=None)
            chosen = next((mark for _, mark in places if mark.seq == near), best[1] if best else None)
            if chosen is not None:
                self.mark = chosen
        super().on_click(event)

    def header(self, row: int) -> Iterable[Piece]:
        if not self.to_scale:
            yield fit("event number", LABEL_WIDTH), "dim"
            first = int(self._offset)
            width = max(1, round(1 / self._per_cell))
            yield (
                "".join(fit(str(number), width) for number in range(first, first + self.plot_width // width + 1)),
                "head",
            )
            return
        yield fit("ms since start", LABEL_WIDTH), "dim"
        ticks = ""
        while len(ticks) < self.plot_width:
            tick = f"{(self._offset + len(ticks) * self._per_cell) / 1e6:.4g}"
            ticks += fit(tick if len(ticks) + len(tick) <= self.plot_width else "", 12)
        yield ticks, "head"

    def pieces(self, index: int) -> Iterable[Piece]:
        lane = self.lanes[index]
        yield fit(lane.label, LABEL_WIDTH), "bold" if index == self.cursor else "plain"
        width = self.plot_width
        letters: list[str] = [" "] * width
        owners: list[Mark | None] = [None] * width
        places = [(self._place(lane, i), mark) for i, mark in enumerate(lane.marks)]
        # Long bars first, so that what happens inside them stays visible; the cursor's event last. A loss gradient
        # always stands at the head of its backward and would hide its letter.
        places.sort(
            key=lambda place: (
                place[1] is self.mark,
                self._culprit(place[1]),
                self.to_scale and place[1].letter != "L",
                place[0][0] - place[0][1],
            )
        )
        for (start, end), mark in places:
            first = int((start - self._offset) / self._per_cell)
            last = max(first, int((end - self._offset) / self._per_cell) - (1 if end > start else 0))
            if mark.letter == "F" and last > first:
                first += 1  # where it begins is inferred from the event before it, whose letter stands there
            if last < 0 or first >= width:
                continue
            text = _bar_text(mark, last - first + 1)
            for cell in range(max(first, 0), min(last + 1, width)):
                letters[cell], owners[cell] = text[cell - first], mark
        start = 0
        while start < width:
            stop = start
            while stop < width and owners[stop] is owners[start]:
                stop += 1
            yield "".join(letters[start:stop]), self._style(owners[start])
            start = stop

    def _culprit(self, mark: Mark) -> bool:
        return self.view is not None and (mark.rank, mark.seq) in self.view.culprits

    def _style(self, mark: Mark | None) -> str | Style:
        if mark is None:
            return "dim"
        if mark is self.mark:
            text = self.rich_style
            return Style(color=text.bgcolor, bgcolor=text.color, bold=True)
        if self._culprit(mark):
            return Style(color="#ffffff", bgcolor="#c02000", bold=True)
        colour = COLOURS[mark.letter]
        if self.view is not None and not self.view.concerns(mark, self.param):
            return Style(color=_faded(colour, self.background_colors[1].hex6))
        return Style(color="#101418", bgcolor=colour)

    def empty(self) -> str:
        return "no event of this step was recorded"


@lru_cache(maxsize=64)
def _faded(colour: str, background: str) -> str:
    """Half way to the background."""
    return Color.parse(background).blend(Color.parse(colour), 0.55).hex6


def _bar_text(mark: Mark, width: int) -> str:
    """Letter, accumulation step, microbatch; a backward that does not reduce is dotted, what is inferred is dashed."""
    text = mark.letter
    if mark.letter in "BF" and mark.accumulation_step is not None:
        text += str(mark.accumulation_step)
        if mark.microbatch:
            text += f".{mark.microbatch}"
    fill = "·" if mark.sync is False else "┄" if mark.letter == "F" else " "
    return (text + fill * width)[:width]

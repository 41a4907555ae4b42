"""A small chart of numbers by step, drawn with eighth blocks."""

from __future__ import annotations

import math

from rich.text import Text
from textual.reactive import reactive
from textual.widget import Widget

_BLOCKS = " ▁▂▃▄▅▆▇█"


class Chart(Widget):
    """Title and a value, below it the curve. Cost is that of its width, not of the number of points."""

    DEFAULT_CSS = "Chart { height: 1fr; border: round $primary; padding: 0 1; }"
    COMPONENT_CLASSES = {"chart--curve"}
    DEFAULT_CSS += "\nChart .chart--curve { color: $secondary; }"

    points: reactive[tuple[tuple[int, float], ...]] = reactive(())

    def __init__(self, title: str, missing: str) -> None:
        super().__init__()
        self._title, self._missing = title, missing

    note = reactive("")
    """Behind the last value."""
    step: reactive[int | None] = reactive(None)
    """The step whose value is told; None, and a step without one, tells the last."""

    def watch_points(self) -> None:
        value = dict(self.points).get(self.step) if self.step is not None else None
        note = self.note if self.points and value in (None, self.points[-1][1]) else ""
        value = self.points[-1][1] if value is None and self.points else value
        told = f" {value:.{4 if note else 5}g}" if value is not None else ""
        whole = self._title + told + note
        # Of the title only its last word where the value would be cut off with it.
        cut_off = 0 < self.size.width < len(whole) + 4
        self.border_title = f"{self._title.split()[-1]}{told}{note}" if cut_off else whole

    def on_resize(self) -> None:
        self.watch_points()

    def watch_note(self) -> None:
        self.watch_points()

    def watch_step(self) -> None:
        self.watch_points()

    def render(self) -> Text:
        if not self.points:
            return Text(self._missing, "dim")
        width, height = self.content_size.width, max(1, self.content_size.height)
        if width < 1:
            return Text("")
        values = [value for _, value in self.points]
        if len(values) == 1:
            return Text(f"{values[0]:.6g} at step {self.points[0][0]}, the only step recorded", "dim")
        levels = _levels(values, width, height * 8)
        rows = [
            "".join(_BLOCKS[max(0, min(8, level - 8 * row))] if level >= 0 else "!" for level in levels)
            for row in reversed(range(height))
        ]
        return Text("\n".join(rows), self.get_component_rich_style("chart--curve", partial=True), no_wrap=True)


def _levels(values: list[float], width: int, steps: int) -> list[int]:
    """For each column the height (1 to steps) of the mean of its values; -1 where one is not finite."""
    columns = min(width, len(values))
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    spread = (high - low) or 1.0
    stretch = max(1, width // columns)
    levels = [1 + round((mean - low) / spread * (steps - 1)) if math.isfinite(mean) else -1 for mean in means]
    return [level for level in levels for _ in range(min(stretch, 4))]

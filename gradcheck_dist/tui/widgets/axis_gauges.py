"""One gauge a mesh axis: its degree, and the factor that the findings lay at its door."""

from __future__ import annotations

import math
import re

from rich.text import Text
from textual.widgets import Static

from gradcheck_dist.tui import scale
from gradcheck_dist.tui.snapshot import Snapshot

_HALF = 4
"""Cells on either side of the middle of a gauge; the ends stand for 1/8 and 8."""


BESIDE_RATIO = 18 + 1 + 2 + 1 + (2 * _HALF + 1) + 1
"""Cells of a line before its ratio: name, degree, gauge."""


class AxisGauges(Static):
    """Axes with a degree above 1, then accumulation steps and microbatches; without the gauges where it is narrow."""

    DEFAULT_CSS = "AxisGauges { height: 1fr; border: round $primary; padding: 0 1; text-wrap: nowrap; }"

    _report: object = None
    _step: object = None
    _width = 0
    _shown: Snapshot | None = None

    def on_mount(self) -> None:
        self.border_title = "axes: ratio 1/8 … 8"

    def on_resize(self) -> None:
        if self._shown is not None:
            self.show(self._shown)

    def show(self, snapshot: Snapshot) -> None:
        self._shown = snapshot
        report = snapshot.report
        width = self.size.width
        if report is self._report and snapshot.step is self._step and width == self._width:
            return
        self._report, self._step, self._width = report, snapshot.step, width
        if report is None:
            self.update("")
            return
        degrees = {axis: degree for axis, degree in report.run.axes.items() if degree > 1}
        if snapshot.step is not None:
            context = snapshot.step.verdict.context
            counts = {"accumulation_steps": context.num_accumulation, "microbatches": context.num_microbatches}
            degrees |= {name: count for name, count in counts.items() if count > 1}
        text, blamed = Text(no_wrap=True, overflow="ellipsis"), set[str]()
        ratios = {name: _ratio(snapshot, name) for name in degrees}
        longest = max((len(scale.short(ratio)) for ratio in ratios.values() if ratio is not None), default=1)
        narrow = width < BESIDE_RATIO + longest
        for name, degree in degrees.items():
            ratio = ratios[name]
            if ratio is not None:
                blamed.add(name)
            elif report.verdict == "undetermined":  # a mark at 1 would say that it is right
                text.append(f"{name:<18} {degree:>2} ").append("?\n", "dim")
                continue
            text.append(f"{name:<18} {degree:>2} ")
            if not narrow:
                text.append_text(gauge(1.0 if ratio is None else ratio)).append(" ")
            text.append(f"{scale.short(1.0 if ratio is None else ratio)}\n", "bold" if ratio is not None else "")
        if not degrees:
            alone = report.run.world_size == 1
            text.append("one rank, one contribution a step\n" if alone else "no mesh axis is known (--axes)\n", "dim")
        if report.findings and not blamed:
            text.append("the factor is no axis' degree", "dim")
        self.update(text, layout=False)


def _ratio(snapshot: Snapshot, name: str) -> float | None:
    """The factor of the first finding whose expression names the axis."""
    for finding in snapshot.report.findings if snapshot.report is not None else ():
        if finding.factor.expression and re.search(rf"\b{name}\b", finding.factor.expression):
            return finding.factor.observed
    return None


def gauge(ratio: float) -> Text:
    """A mark on a line from 1/8 to 8, in the colour of the ratio."""
    level = max(-scale.LIMIT, min(scale.LIMIT, math.log2(ratio))) if ratio > 0 else -scale.LIMIT
    at = round((level + scale.LIMIT) / (2 * scale.LIMIT) * 2 * _HALF)
    text = Text()
    for cell in range(2 * _HALF + 1):
        right = abs(level) < 1e-3
        if cell == at:
            text.append(scale.sign(ratio, right), scale.style(ratio, right))
        else:
            text.append("┼" if cell == _HALF else "─", "dim")
    return text

"""Screen 6: this run and another side by side."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from gradcheck_dist.reports.text import prose
from gradcheck_dist.tui.screens.base import RunScreen
from gradcheck_dist.tui.snapshot import Selection, Snapshot
from gradcheck_dist.tui.widgets.compare_rows import CompareRows, Line, compare
from gradcheck_dist.tui.widgets.verdict_box import VerdictBox


class Compare(RunScreen):
    """Two verdicts above, facts and weights below."""

    MODE = "compare"
    DEFAULT_CSS = """
    Compare Horizontal { height: auto; max-height: 45%; overflow-y: auto; }
    Compare VerdictBox { width: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("o", "other", "Other run"),
        Binding("x", "differences", "Only differences"),
    ]

    _compared: tuple[int, ...] = ()
    _lines: list[Line] = []

    def body(self) -> ComposeResult:
        with Horizontal():
            yield VerdictBox(id="left")
            yield VerdictBox(id="right")
        yield CompareRows(classes="main")

    def nothing(self, snapshot: Snapshot) -> str | None:
        if snapshot.other is None:
            if snapshot.siblings:
                return (
                    f"No other run is loaded. Press o to take one of the {len(snapshot.siblings)} beside this one, "
                    "or start with --compare RUN."
                )
            return "There is no other run beside this one. Start with --compare RUN to name one."
        if snapshot.other.report is None:
            return f"The other run cannot be shown: {prose(snapshot.other.problem)}"
        return None

    def show(self, snapshot: Snapshot, selection: Selection) -> None:
        other = snapshot.other
        if other is None or other.report is None or other.document is None or snapshot.report is None:
            return
        if snapshot.document is not None:
            self.query_one("#left", VerdictBox).show_document(snapshot.document, brief=True)
        self.query_one("#right", VerdictBox).show_document(other.document, brief=True)
        mine = snapshot.step.param_grid if snapshot.step is not None else None
        grids = [grid for grid in (mine, other.grid) if grid is not None]
        compared = (id(snapshot.report), id(mine), id(other))
        if compared != self._compared:
            self._compared, self._lines = compared, compare(snapshot.report, other.report, mine, other.grid)
        lines = self._lines
        self.query_one(CompareRows).show(lines, max((grid.tolerance for grid in grids), default=1e-4))

    def action_other(self) -> None:
        snapshot = self.watch_app.shown
        if not snapshot.siblings:
            self.notify("There is no other run beside this one. Start with --compare RUN.", markup=False)
            return
        here = snapshot.other.path if snapshot.other is not None else None
        at = snapshot.siblings.index(here) if here in snapshot.siblings else -1
        self.watch_app.source.compare_with(snapshot.siblings[(at + 1) % len(snapshot.siblings)])

    def action_differences(self) -> None:
        rows = self.query_one(CompareRows)
        rows.only_differences = not rows.only_differences
        self.update()

"""Screen 3: what every rank did when."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gradcheck_dist.tui.screens.base import RunScreen
from gradcheck_dist.tui.snapshot import Selection, Snapshot
from gradcheck_dist.tui.widgets.mark_box import MarkBox
from gradcheck_dist.tui.widgets.rows import Rows
from gradcheck_dist.tui.widgets.timeline_chart import TimelineChart


class Timeline(RunScreen):
    """Events that do not concern the selected parameter are dim."""

    MODE = "timeline"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "jump", "First divergence"),
    ]
    _jumped: tuple[int | None, int | None] = (None, None)

    def body(self) -> ComposeResult:
        yield TimelineChart(classes="main")
        yield MarkBox()

    def show(self, snapshot: Snapshot, selection: Selection) -> None:
        assert snapshot.step is not None
        chart = self.query_one(TimelineChart)
        chart.show(snapshot.step, selection.param)
        wanted = (selection.rank, selection.seq)
        if wanted != self._jumped and selection.rank is not None and selection.seq is not None:
            self._jumped = wanted
            chart.jump(selection.rank, selection.seq)
        self.query_one(MarkBox).show(snapshot.step, chart.mark)

    @on(TimelineChart.MarkMoved)
    def _moved(self, message: TimelineChart.MarkMoved) -> None:
        step = self.watch_app.shown.step
        if step is not None:
            self.query_one(MarkBox).show(step, message.mark)

    @on(Rows.Chosen)
    def _chosen(self) -> None:
        mark = self.query_one(TimelineChart).mark
        if mark is not None:
            self.watch_app.open_event(mark.rank, mark.seq)

    def action_jump(self) -> None:
        step = self.watch_app.shown.step
        if step is None or not step.culprits:
            self.notify("No divergence in this step.", markup=False)
            return
        self.query_one(TimelineChart).jump(*min(step.culprits))

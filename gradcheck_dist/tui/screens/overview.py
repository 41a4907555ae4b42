"""Screen 1: the verdict, who is alive, the axes, loss and gradient norm, the findings."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from gradcheck_dist.tui.screens.base import RunScreen
from gradcheck_dist.tui.snapshot import Selection, Snapshot
from gradcheck_dist.tui.widgets.axis_gauges import AxisGauges
from gradcheck_dist.tui.widgets.chart import Chart
from gradcheck_dist.tui.widgets.findings_list import FindingsList
from gradcheck_dist.tui.widgets.rank_strip import RankStrip
from gradcheck_dist.tui.widgets.rows import Rows
from gradcheck_dist.tui.widgets.verdict_box import VerdictBox


class Overview(RunScreen):
    """Verdict first."""

    MODE = "overview"
    NEEDS_STEP = False
    DEFAULT_CSS = """
    Overview VerdictBox { max-height: 55%; overflow-y: auto; }
    Overview #figures { height: 5; }
    Overview.tall #figures { height: 9; }
    Overview.low #figures { display: none; }
    Overview AxisGauges { width: 2fr; }
    Overview Chart { width: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "To its line", show=True)]

    def body(self) -> ComposeResult:
        yield VerdictBox()
        yield RankStrip()
        with Horizontal(id="figures"):
            yield AxisGauges()
            yield Chart("loss", "no loss recorded")
            yield Chart("grad norm", "no norm recorded")
        yield FindingsList(classes="main")

    def on_resize(self) -> None:
        self.set_class(self.size.height >= 36, "tall")
        self.set_class(self.size.height < 20, "low")

    def show(self, snapshot: Snapshot, selection: Selection) -> None:
        self.query_one(VerdictBox).show(snapshot)
        self.query_one(RankStrip).show(snapshot)
        self.query_one(AxisGauges).show(snapshot)
        loss, norm = self.query(Chart)
        series = snapshot.series
        loss.points, norm.points = series.loss, series.grad_norm
        norm.note = f"→{series.clipped:.3g}" if series.clipped is not None else ""
        loss.step = norm.step = snapshot.step.step if snapshot.step is not None and not snapshot.live else None
        rows = self.query_one(FindingsList)
        rows.show(snapshot)

    @on(Rows.Chosen)
    def _chosen(self, message: Rows.Chosen) -> None:
        self.watch_app.open_finding(message.index)

    def action_open(self) -> None:
        self.watch_app.open_finding(self.query_one(FindingsList).cursor)

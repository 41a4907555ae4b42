"""Screen 5: the modules, what they got, and what could not be seen."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gradcheck_dist.tui.screens.base import RunScreen
from gradcheck_dist.tui.snapshot import Selection, Snapshot
from gradcheck_dist.tui.widgets.param_rows import ParamRows
from gradcheck_dist.tui.widgets.rows import Rows


class Parameters(RunScreen):
    """A tree."""

    MODE = "parameters"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "noop", "Fold/open", show=True),
        Binding("slash", "search", "Search", key_display="/"),
    ]
    _contains = ""

    def body(self) -> ComposeResult:
        yield ParamRows(classes="main")

    def show(self, snapshot: Snapshot, selection: Selection) -> None:
        assert snapshot.step is not None
        self.query_one(ParamRows).show(snapshot.step.params, self._contains)

    def filter(self, contains: str) -> None:
        self._contains = contains
        self.update()

    def action_noop(self) -> None:
        """The list itself answers to enter; this only puts the key into the footer."""

    @on(Rows.Chosen)
    def _chosen(self) -> None:
        node = self.query_one(ParamRows).at_cursor()
        step = self.watch_app.shown.step
        if node is None or node.line is None or step is None:
            return
        holders = [holder for key, holder in step.held_by if key == node.line.key]
        if node.line.num_cells and holders:
            self.watch_app.open_path(node.line.key, holders[0], self.watch_app.selection.key)
        else:
            self.notify(node.line.reason or "No gradient of it was seen.", title="unidentifiable", markup=False)

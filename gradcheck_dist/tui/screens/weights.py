"""Screen 2: observed / expected as a map, with the three ledgers of the cell under the cursor."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import reactive

from gradcheck_dist.tui.grid import COLUMN_SLICES, ROW_SLICES, WeightGrid, slice_grid, worst_cell
from gradcheck_dist.tui.screens.base import RunScreen
from gradcheck_dist.tui.snapshot import Selection, Snapshot
from gradcheck_dist.tui.widgets.cell_box import CellBox
from gradcheck_dist.tui.widgets.heatmap import Heatmap
from gradcheck_dist.tui.widgets.rows import Rows


class Weights(RunScreen):
    """`r` and `c` change what rows and columns are; a merged cell shows the worst of those it stands for."""

    MODE = "weights"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "numbers", "Numbers"),
        Binding("r", "rows", "Rows"),
        Binding("c", "columns", "Columns"),
        Binding("slash", "search", "Search", key_display="/"),
    ]

    rows = reactive(ROW_SLICES[0], init=False)
    columns = reactive(COLUMN_SLICES[0], init=False)
    _contains = ""
    _sliced: tuple[object, ...] = ()
    _begun: int | None = None
    """The step for which the cursor was put on the worst cell; from there on it is the user's."""

    def body(self) -> ComposeResult:
        yield Heatmap(classes="main")
        yield CellBox()

    def show(self, snapshot: Snapshot, selection: Selection) -> None:
        self.query_one(CellBox).accused = bool(snapshot.report is not None and snapshot.report.findings)
        if self.rows.startswith("param") and snapshot.step is not None:
            self._slice(snapshot.step.param_grid)
        elif snapshot.grid is not None:
            self._slice(snapshot.grid)

    def _slice(self, grid: WeightGrid) -> None:
        wanted = (id(grid), self.rows, self.columns, self._contains)
        if wanted != self._sliced:
            self._sliced = wanted
            heatmap, part = self.query_one(Heatmap), slice_grid(grid, self.rows, self.columns, self._contains)
            heatmap.axes = (self.rows + (" filtered" if self._contains else ""), self.columns)
            heatmap.show(part)
            if self._begun != grid.step:
                self._begun = grid.step
                worst = worst_cell(grid)
                place = part.place(*worst) if worst is not None else None
                if place is not None:
                    heatmap.cursor, heatmap.column = place
        self._cell()

    def on_mount(self) -> None:
        # Watched and not told by a message: the box is drawn in the same frame as the cursor.
        for name in ("cursor", "column"):
            self.watch(self.query_one(Heatmap), name, self._cell, init=False)

    def _cell(self) -> None:
        heatmap = self.query_one(Heatmap)
        if heatmap.part is not None:
            self.query_one(CellBox).show(heatmap.part, heatmap.cursor, heatmap.column)

    def action_numbers(self) -> None:
        heatmap = self.query_one(Heatmap)
        heatmap.numbers = not heatmap.numbers

    def action_rows(self) -> None:
        self.rows = ROW_SLICES[(ROW_SLICES.index(self.rows) + 1) % len(ROW_SLICES)]
        self.update()

    def action_columns(self) -> None:
        self.columns = COLUMN_SLICES[(COLUMN_SLICES.index(self.columns) + 1) % len(COLUMN_SLICES)]
        self.update()

    def filter(self, contains: str) -> None:
        self._contains = contains
        self.update()

    @on(Rows.Chosen)
    def _chosen(self) -> None:
        heatmap = self.query_one(Heatmap)
        if heatmap.part is not None and heatmap.count:
            (unit, rank), key = heatmap.part.origin(heatmap.cursor, heatmap.column)
            self.watch_app.open_cell(unit, rank, key, by_param=self.rows.startswith("param"))

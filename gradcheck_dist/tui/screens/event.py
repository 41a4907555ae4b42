"""Screen 4: one event, and the ledger as it stood right after it. Stepping replays the step."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Static

from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.reports.text import printable
from gradcheck_dist.tui.screens.base import RunScreen
from gradcheck_dist.tui.snapshot import Selection, Snapshot
from gradcheck_dist.tui.step_view import Stop
from gradcheck_dist.tui.widgets.event_card import NARROW, EventCard
from gradcheck_dist.tui.widgets.rows import Rows
from gradcheck_dist.tui.widgets.stops_list import SAME, StopsList


class EventScreen(RunScreen):
    """Left the way of one contribution into one parameter's gradient, right the event under the cursor."""

    MODE = "event"
    DEFAULT_CSS = """
    EventScreen StopsList { width: 33; }
    EventScreen VerticalScroll { width: 1fr; border-left: solid $primary; }
    EventScreen VerticalScroll:focus { border-left: heavy $accent; }
    EventScreen.narrow Horizontal { layout: vertical; }
    EventScreen.narrow StopsList { width: 100%; height: 2fr; }
    EventScreen.narrow VerticalScroll { width: 100%; height: 3fr; border-left: none; border-top: solid $primary; }
    EventScreen.narrow VerticalScroll:focus { border-top: heavy $accent; }
    EventScreen #path { height: 1; background: $surface; color: $accent; text-wrap: nowrap; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,p", "step_event(-1)", "Back", key_display="←"),
        Binding("right,n", "step_event(1)", "Forward", key_display="→"),
        Binding("j", "jump", "Divergence", show=False),
        Binding("k", "next_key(1)", "Contribution"),
        Binding("u", "next_param(1)", "Parameter"),
        Binding("h", "next_holder(1)", "Holder"),
        Binding("escape", "leave", "Back to where it was opened", show=False),
    ]
    _stops: list[Stop] = []

    def body(self) -> ComposeResult:
        yield Static(id="path", markup=False)
        with Horizontal():
            yield StopsList(classes="main")
            with VerticalScroll():
                yield EventCard()

    def on_resize(self) -> None:
        self.set_class(self.size.width < NARROW, "narrow")
        self.update()

    def nothing(self, snapshot: Snapshot) -> str | None:
        if self.app is None or snapshot.step is None or not snapshot.step.lanes:
            return "No event of this step was recorded."
        return None

    def show(self, snapshot: Snapshot, selection: Selection) -> None:
        step = snapshot.step
        assert step is not None
        rows = self.query_one(StopsList)
        if selection.param is not None and selection.holder is not None and selection.key is not None:
            self._stops = step.stops(selection.param, selection.holder, selection.key)
        else:
            self._stops = []
        rows.show(self._stops, step.culprits)
        if rows.display != bool(self._stops):  # what lies on no path leaves its place to the card
            rows.display = bool(self._stops)
            self.query_one(StopsList if self._stops else VerticalScroll).focus()
        at = next((i for i, s in enumerate(self._stops) if (s.rank, s.seq) == (selection.rank, selection.seq)), None)
        if at is not None:
            rows.cursor = at
        self._card(snapshot, selection, at)

    def _card(self, snapshot: Snapshot, selection: Selection, at: int | None) -> None:
        step = snapshot.step
        assert step is not None
        stop = self._stops[at] if at is not None else None
        where = (-1, -1) if selection.rank is None or selection.seq is None else (selection.rank, selection.seq)
        mark = step.marks.get(where)
        cell, ledger = None, []
        if selection.param is not None and selection.holder is not None and selection.key is not None:
            cell = step.cell(selection.param, selection.holder, selection.key)
            ledger = step.ledger_at(selection.param, selection.holder, stop) if stop is not None else []
        self.query_one(EventCard).show(
            mark,
            stop,
            cell,
            ledger,
            culprit=step.culprits.get(where),
            finding=_finding(snapshot, selection),
            beside=bool(self._stops) and self.size.width >= NARROW,
        )
        self.query_one(VerticalScroll).scroll_home(animate=False)
        self.query_one("#path", Static).update(_path_title(selection, self.size.width - 2))

    @on(Rows.Moved)
    def _moved(self, message: Rows.Moved) -> None:
        if message.index < len(self._stops):
            stop = self._stops[message.index]
            app = self.watch_app
            if (stop.rank, stop.seq) != (app.selection.rank, app.selection.seq):
                app.selection = replace(app.selection, rank=stop.rank, seq=stop.seq)

    def action_step_event(self, by: int) -> None:
        self.query_one(StopsList).action_move(by)

    def action_leave(self) -> None:
        self.watch_app.leave_event()

    def action_jump(self) -> None:
        step = self.watch_app.shown.step
        culprits = step.culprits if step is not None else frozenset()
        at = next((i for i, stop in enumerate(self._stops) if (stop.rank, stop.seq) in culprits), None)
        if at is None:
            at, words = self._last_change()
            self.notify(words, markup=False)
        if at is not None:
            self.query_one(StopsList).cursor = at

    def _last_change(self) -> tuple[int | None, str]:
        """Where a path that passes no accused event goes wrong, and words for it."""
        if not self._stops:
            return None, "This event lies on no path, so there is nowhere to jump."
        step, chosen = self.watch_app.shown.step, self.watch_app.selection
        cell = None
        if step is not None and chosen.param is not None and chosen.holder is not None and chosen.key is not None:
            cell = step.cell(chosen.param, chosen.holder, chosen.key)
        if cell is not None and cell.right:
            return None, "This contribution arrives right: there is no divergence on its path."
        changes = [at for at, stop in enumerate(self._stops) if abs(stop.after - stop.before) > SAME * abs(stop.before)]
        if cell is None or not changes:
            return None, "No event on this path is accused."
        return changes[-1], "No event on this path is accused. Here its ratio changes for the last time."

    def action_next_key(self, by: int) -> None:
        step, selection = self.watch_app.shown.step, self.watch_app.selection
        if step is None or selection.param is None or selection.holder is None:
            return
        held = step.held_by.get((selection.param, selection.holder))
        keys = list(dict.fromkeys(cell.key for cell in held.cells)) if held is not None else []
        if keys:
            at = keys.index(selection.key) if selection.key in keys else -1
            self.watch_app.open_path(selection.param, selection.holder, keys[(at + by) % len(keys)])
            if len(keys) == 1:
                self.notify("No other contribution reaches this parameter here.", markup=False)

    def action_next_param(self, by: int) -> None:
        step, selection = self.watch_app.shown.step, self.watch_app.selection
        if step is None:
            return
        params = [key for key, holder in step.held_by if holder == selection.holder and step.held_by[key, holder].cells]
        if params and selection.holder is not None:
            at = params.index(selection.param) if selection.param in params else -1
            self.watch_app.open_path(params[(at + by) % len(params)], selection.holder, selection.key)
            if len(params) == 1:
                self.notify(f"Of no other parameter on rank {selection.holder} a weight is known.", markup=False)

    def action_next_holder(self, by: int) -> None:
        step, selection = self.watch_app.shown.step, self.watch_app.selection
        if step is None or selection.param is None:
            return
        holders = [holder for key, holder in step.held_by if key == selection.param]
        if holders:
            at = holders.index(selection.holder) if selection.holder in holders else -1
            self.watch_app.open_path(selection.param, holders[(at + by) % len(holders)], selection.key)
            if len(holders) == 1:
                self.notify(f"No other rank than {holders[0]} holds this parameter.", markup=False)


def _finding(snapshot: Snapshot, selection: Selection) -> Finding | None:
    """The selected finding."""
    findings = snapshot.report.findings if snapshot.report is not None else []
    return findings[selection.finding] if selection.finding < len(findings) else None


def _path_title(selection: Selection, width: int) -> str:
    """Which contribution into which parameter, spelled out where there is room."""
    if selection.param is None or selection.key is None:
        return "an event of the step, on the path of no observed contribution"
    data_rank, step, microbatch = selection.key
    stage, name = selection.param
    where = f"stage {stage}: " if stage >= 0 else ""
    into = f"into {where}{name} on rank {selection.holder}"
    short = f"d{data_rank} k{step} m{microbatch}"
    whole = f"path of {short} (data rank {data_rank}, accumulation step {step}, microbatch {microbatch}) {into}"
    return printable(whole if len(whole) <= width else f"path of {short} {into}")

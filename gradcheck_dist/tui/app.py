"""The application: one worker thread brings snapshots, seven screens show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from textual import on, work
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.reactive import reactive
from textual.screen import Screen

from gradcheck_dist.tui.messages import SnapshotReady
from gradcheck_dist.tui.snapshot import Selection, Snapshot
from gradcheck_dist.tui.source import Source
from gradcheck_dist.tui.themes import DARK, THEMES

TOLD_S = 8.0

SCREENS = {
    "overview": "Overview",
    "weights": "Weights",
    "timeline": "Timeline",
    "event": "EventScreen",
    "parameters": "Parameters",
    "compare": "Compare",
    "explain": "Explain",
}
"""Mode and class; a screen's module is named like its mode, and loads when it is first opened."""


def _screen(mode: str) -> Callable[[], Screen[Any]]:
    def load() -> Screen[Any]:
        module = import_module(f"gradcheck_dist.tui.screens.{mode}")
        made: Screen[Any] = getattr(module, SCREENS[mode])()
        return made

    return load


class WatchApp(App[None]):
    """Watches one source. `snapshot` is the newest, `shown` what the screens show (older while paused). `asked_step` is
    the step that a key asked for, until it is shown."""

    TITLE = "gradcheck"
    MODES: ClassVar[dict[str, Any]] = {mode: _screen(mode) for mode in SCREENS}
    DEFAULT_MODE = "overview"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        *(
            Binding(str(index), f"switch_mode('{mode}')", mode.capitalize(), show=False)
            for index, mode in enumerate(SCREENS, 1)
        ),
        Binding("d", "divergence", "Divergence"),
        Binding("left_square_bracket", "step(-1)", "Step -", show=False, key_display="["),
        Binding("right_square_bracket", "step(1)", "Step +", show=False, key_display="]"),
        # Help and quit come first: a terminal of 80 columns has no place for all.
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("f", "follow", "Follow"),
        Binding("space", "pause", "Pause"),
        Binding("ctrl+o", "output", "Output"),
        Binding("t", "next_theme", "Theme", show=False),
    ]

    snapshot: reactive[Snapshot] = reactive(Snapshot(""), init=False, always_update=True)
    selection: reactive[Selection] = reactive(Selection(), init=False)
    paused = reactive(False, init=False)
    follow = reactive(False, init=False)

    def __init__(self, source: Source, path: str = "", *, mode: str = "overview", told: str = "") -> None:
        """`told`: what is said once, as the screens open."""
        super().__init__()
        self.source = source
        self.shown = Snapshot(path)
        self.command = ""
        self._first_mode = mode
        self._told = told
        self._selected_step: int | None = None
        self.asked_step: int | None = None
        self._wanted_finding: int | None = None
        self._eager = False
        self._opened_from = "overview"
        self.set_reactive(WatchApp.snapshot, self.shown)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = DARK.name

    def on_mount(self) -> None:
        if self._first_mode != "overview":
            self.switch_mode(self._first_mode)
        if self._told:
            self.notify(self._told, timeout=TOLD_S, markup=False)
        # Reading begins after the first frame: an answer on the screen comes before numpy is loaded.
        self.call_after_refresh(self._watch)

    def on_unmount(self) -> None:
        self.source.stop()

    @work(thread=True, exclusive=True, exit_on_error=False)
    def _watch(self) -> None:
        for snapshot in self.source.snapshots():
            if not self.is_running:
                return
            self.post_message(SnapshotReady(snapshot))

    @on(SnapshotReady)
    def _take(self, message: SnapshotReady) -> None:
        self.snapshot = message.snapshot

    def watch_snapshot(self) -> None:
        if not self.paused:
            self._show_newest()
        self.update_screen()

    def _show_newest(self) -> None:
        moved = (self.shown.live, self.shown.has_output) != (self.snapshot.live, self.snapshot.has_output)
        self.shown = self.snapshot
        if moved:
            self.refresh_bindings()
        step = self.shown.step
        if step is not None and step.step == self.asked_step:
            self.asked_step = None
        if step is not None and (self._selected_step != step.step or self._wanted_finding is not None):
            self._selected_step = step.step
            index, self._wanted_finding = self._wanted_finding or 0, None
            self.selection = self._selection_of(index)
            if self._eager and self.shown.report is not None and self.shown.report.findings:
                self._eager = False
                self._open_event()

    def watch_selection(self) -> None:
        self.update_screen()

    def watch_paused(self) -> None:
        if not self.paused:
            self._show_newest()
        self.update_screen()

    def watch_follow(self) -> None:
        self.asked_step = None
        self.source.show_step(-1 if self.follow else None)
        self.update_screen()

    def update_screen(self) -> None:
        """Let the screen in front show what is there now."""
        update = getattr(self.screen, "update", None) if self.is_running and self._screen_stack_ready() else None
        if update is not None and hasattr(self.screen, "MODE"):
            update()

    def _screen_stack_ready(self) -> bool:
        return bool(self._screen_stacks.get(self._current_mode))

    # ---- what is selected

    def _selection_of(self, index: int) -> Selection:
        """A finding's cell and culprit; without findings any cell."""
        from gradcheck_dist.diagnosis.steps.step_verdict import cause

        step, report = self.shown.step, self.shown.report
        if step is None or report is None:
            return Selection()
        if report.findings:
            finding = report.findings[min(index, len(report.findings) - 1)]
            of_step = step.verdict.findings
            mine = [one for one in of_step if cause(one) == cause(finding)]
            mine = mine or [one for one in of_step if one.code == finding.code] or of_step
            if mine:
                event, wrong = mine[0].first_event, step.first_wrong(mine[0])
                rank, seq = (event.rank, event.seq) if event is not None else (None, None)
                param, holder, key = wrong if wrong is not None else (None, None, None)
                return Selection(index, param, holder, key, rank, seq)
        held = next((held for held in step.verdict.held if held.cells), None)
        if held is None:
            mark = next(iter(step.marks), (None, None))
            return Selection(index, rank=mark[0], seq=mark[1])
        key = held.cells[0].key
        stops = step.stops(held.param, held.rank, key)
        return Selection(index, held.param, held.rank, key, stops[0].rank, stops[0].seq)

    def select_finding(self, index: int) -> None:
        """Make a finding the selected one; its step is shown."""
        report, step = self.shown.report, self.shown.step
        if report is None or not 0 <= index < len(report.findings):
            return
        finding = report.findings[index]
        if step is not None and step.step == finding.step:
            self.selection = self._selection_of(index)
        else:
            self._wanted_finding = index
            self.asked_step = finding.step
            self.source.show_step(finding.step)

    def open_finding(self, index: int) -> None:
        """Go to the culprit of a finding."""
        report = self.shown.report
        if report is None and self.shown.phase in ("reading", "recording"):
            self._wanted_finding, self._eager = index, True
            self.notify("Still reading: the first divergence opens as soon as it is known.", markup=False)
            return
        if report is None or not report.findings:
            self.notify(self._why_nothing(), markup=False)
            return
        self.select_finding(index)
        self._open_event()

    def _why_nothing(self) -> str:
        report = self.shown.report
        if report is None:
            return "There is no verdict yet: the Overview (1) says what it waits for."
        if report.verdict == "undetermined":
            return "The run could not be judged, so no line is accused: the Overview (1) says why."
        return "Nothing was found yet." if self.shown.live else "Nothing was found: the run is clean."

    def open_event(self, rank: int, seq: int) -> None:
        """Go to an event; the selected path stays when the event lies on it, else one that it lies on."""
        step, chosen = self.shown.step, replace(self.selection, rank=rank, seq=seq)
        if step is not None and not self._on_path(rank, seq):
            mark = step.marks.get((rank, seq))
            for held in step.verdict.held:
                if mark is None or held.rank != rank or not held.cells or not step.concerns(mark, held.param):
                    continue
                keys = [cell.key for cell in held.cells]
                passing = [
                    k for k in keys if any((s.rank, s.seq) == (rank, seq) for s in step.stops(held.param, rank, k))
                ]
                if passing:
                    chosen = replace(chosen, param=held.param, holder=rank, key=passing[0])
                    break
        self.selection = chosen
        self._open_event()

    def _open_event(self) -> None:
        if self.current_mode != "event":
            self._opened_from = self.current_mode
        self.switch_mode("event")

    def leave_event(self) -> None:
        """Back to the screen from which the Event was opened."""
        self.switch_mode(self._opened_from)

    def _on_path(self, rank: int, seq: int) -> bool:
        step, chosen = self.shown.step, self.selection
        if step is None or chosen.param is None or chosen.holder is None or chosen.key is None:
            return False
        return any((s.rank, s.seq) == (rank, seq) for s in step.stops(chosen.param, chosen.holder, chosen.key))

    def open_path(self, param: tuple[int, str], holder: int, key: tuple[int, int, int] | None) -> None:
        """Go to the way of a contribution into a parameter's gradient, to its first divergence if there is one."""
        step = self.shown.step
        held = step.held_by.get((param, holder)) if step is not None else None
        if step is None or held is None or not held.cells:
            self.notify("Nothing is known about this parameter on this rank.", markup=False)
            return
        keys = [cell.key for cell in held.cells]
        chosen = key if key in keys else keys[0]
        stops = step.stops(param, holder, chosen)
        here = (self.selection.rank, self.selection.seq)
        places = [(stop.rank, stop.seq) for stop in stops]
        at = here if here in places else next((place for place in places if place in step.culprits), places[0])
        self.selection = replace(self.selection, param=param, holder=holder, key=chosen, rank=at[0], seq=at[1])
        self._open_event()

    def open_cell(self, row: str, holder: int, key: tuple[int, int, int], *, by_param: bool = False) -> None:
        """Go to a cell of the weights map; `row` names a unit, or a parameter."""
        step = self.shown.step
        for (param, rank), held in step.held_by.items() if step is not None else ():
            if rank != holder or step is None or not any(cell.key == key for cell in held.cells):
                continue
            if row.endswith(param[1]) if by_param else step.units.get(param) == row:
                self.open_path(param, holder, key)
                return

    # ---- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Follow and pause are offered where something moves, and where they are on already."""
        if action == "follow":
            return self.shown.live or self.follow
        if action == "output":
            return self.shown.has_output
        if action == "pause":
            return self.shown.live or self.paused
        return True

    def action_divergence(self) -> None:
        self.open_finding(self.selection.finding)

    def action_step(self, by: int) -> None:
        snapshot = self.shown
        if snapshot.step is None or snapshot.step.step not in snapshot.recorded:
            return
        # Judging a step takes a moment: the next key counts from the step that the last one asked for.
        now = self.asked_step if self.asked_step in snapshot.recorded else snapshot.step.step
        at = snapshot.recorded.index(now) + by
        if 0 <= at < len(snapshot.recorded):
            self.set_reactive(WatchApp.follow, False)
            self.asked_step = snapshot.recorded[at]
            self.source.show_step(self.asked_step)
            self.update_screen()

    def action_follow(self) -> None:
        self.follow = not self.follow

    def action_pause(self) -> None:
        self.paused = not self.paused

    def action_output(self) -> None:
        from gradcheck_dist.tui.output import LOG_NAME
        from gradcheck_dist.tui.screens.output import OutputScreen

        self.push_screen(OutputScreen(Path(self.shown.path) / LOG_NAME))

    def action_help_quit(self) -> None:
        """Ctrl-C: neither the screens nor a training end by it."""
        trains = self.shown.live or self.shown.phase in ("waiting", "recording")
        goes_on = ", and the training goes on" if trains else ""
        self.notify(f"Ctrl-C does nothing here: q closes the screens{goes_on}.", markup=False)

    def command_ended(self, exit_code: int) -> None:
        """The command that `gradcheck run --live` started has ended."""
        self.command = "command ended" if exit_code == 0 else f"COMMAND FAILED, EXIT {exit_code}"
        how = "ended" if exit_code == 0 else f"failed with exit code {exit_code}"
        self.notify(f"The command {how}. ctrl+o shows its output, q closes the screens.", markup=False, timeout=10)
        self.update_screen()

    def action_next_theme(self) -> None:
        names = [theme.name for theme in THEMES]
        at = names.index(self.theme) if self.theme in names else -1
        self.theme = names[(at + 1) % len(names)]

    def action_help(self) -> None:
        from gradcheck_dist.tui.screens.help import HelpScreen

        self.push_screen(HelpScreen())

    def deliver_screenshot(
        self, filename: str | None = None, path: str | None = None, time_format: str | None = None
    ) -> str | None:
        """Into the working directory, as reports are: a server has no downloads folder."""
        return super().deliver_screenshot(filename, path or str(Path.cwd()), time_format)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for index, mode in enumerate(SCREENS, 1):
            yield SystemCommand(mode.capitalize(), f"Screen {index}", lambda mode=mode: self.switch_mode(mode))
        yield SystemCommand("First divergence", "The culprit's event and source line", self.action_divergence)
        yield SystemCommand("Follow", "Show the newest step as it comes", self.action_follow)
        yield SystemCommand("Pause", "Freeze the display, never the training", self.action_pause)
        yield SystemCommand("Help", "All keys", self.action_help)

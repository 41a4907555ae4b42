"""What all screens share: tabs, status, footer, search, and a notice where there is nothing to show."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widgets import Footer, Input

from gradcheck_dist.reports.text import prose
from gradcheck_dist.tui.snapshot import Selection, Snapshot
from gradcheck_dist.tui.widgets.notice import Notice
from gradcheck_dist.tui.widgets.status_bar import StatusBar
from gradcheck_dist.tui.widgets.top_bar import TopBar

if TYPE_CHECKING:
    from gradcheck_dist.tui.app import WatchApp


class Body(Vertical):
    """What lies between status and footer. Like the screen it is never seen itself: drawn blank, without decoration."""

    BLANK = True

    def render_lines(self, crop: Region) -> list[Strip]:
        """One blank line for all: the compositor cuts every line of every widget, and keeps the pieces by line."""
        return super().render_lines(Region(crop.x, crop.y, crop.width, min(crop.height, 1))) * crop.height


class RunScreen(Screen[None]):
    """A screen shows a snapshot and a selection; it keeps nothing of its own that a new snapshot could not replace."""

    BLANK = True
    MODE: ClassVar[str] = ""
    NEEDS_STEP: ClassVar[bool] = True
    AUTO_FOCUS = ".main"
    DEFAULT_CSS = """
    RunScreen #body { height: 1fr; }
    RunScreen #search { height: 1; border: none; padding: 0 1; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave_search", "Back", show=False)]

    def render_lines(self, crop: Region) -> list[Strip]:
        """As Body does."""
        return super().render_lines(Region(crop.x, crop.y, crop.width, min(crop.height, 1))) * crop.height

    def compose(self) -> ComposeResult:
        yield TopBar(self.MODE)
        yield StatusBar()
        yield Notice()
        with Body(id="body"):
            yield from self.body()
        yield Footer(compact=True, show_command_palette=False)

    def body(self) -> ComposeResult:
        """The widgets between status and footer."""
        yield from ()

    def show(self, snapshot: Snapshot, selection: Selection) -> None:
        """Show what is there. Called only when there is something to show."""

    def nothing(self, snapshot: Snapshot) -> str | None:
        """Words for the case that this screen has nothing to show though the run was judged."""
        return None

    @property
    def watch_app(self) -> WatchApp:
        return cast("WatchApp", self.app)

    def update(self) -> None:
        """Show the app's present snapshot and selection."""
        if not self.is_mounted or not self.is_current:
            return
        app = self.watch_app
        snapshot = app.shown
        behind = app.snapshot is not snapshot
        self.query_one(StatusBar).show(
            snapshot, paused=app.paused, follow=app.follow, behind=behind, command=app.command, asked=app.asked_step
        )
        words = None if not self.NEEDS_STEP else self._why_not(snapshot)
        notice = self.query_one(Notice)
        notice.display = words is not None
        self.query_one("#body").display = words is None
        if words is not None:
            notice.show(snapshot, words)
        else:
            self.show(snapshot, app.selection)

    def _why_not(self, snapshot: Snapshot) -> str | None:
        if snapshot.phase == "reading":
            return prose(snapshot.message) or f"Reading {prose(snapshot.path)} …"
        if snapshot.step is None:
            return prose(snapshot.message) or (
                "No optimizer step was recorded, so there is nothing to show here. The Overview (1) says why."
            )
        return self.nothing(snapshot)

    def on_mount(self) -> None:
        self.update()

    def on_screen_resume(self) -> None:
        self.update()

    @on(TopBar.Picked)
    def _pick(self, message: TopBar.Picked) -> None:
        self.app.switch_mode(message.mode)

    # ---- search

    def filter(self, contains: str) -> None:
        """Show only what contains this. Screens with a search override it and bind `/`."""

    async def action_search(self) -> None:
        # Made when it is first asked for: from Python 3.12 on textual composes a screen before the app has it, and an
        # Input asks the app for its screen.
        box = self._search_box
        if box is None:
            box = Input(placeholder="search", id="search", compact=True)
            await self.mount(box, before=self.query_one(Footer))
        box.display = True
        box.focus()

    def action_leave_search(self) -> None:
        box = self._search_box
        if box is not None and box.display:
            box.value = ""
            self._close_search(box)
            self.filter("")

    @property
    def _search_box(self) -> Input | None:
        """The search line; None before the first search."""
        return next(iter(self.query("#search").results(Input)), None)

    def _close_search(self, box: Input) -> None:
        box.display = False
        self.focus_main()

    def focus_main(self) -> None:
        """Give the keys back to the main widget."""
        self.focus_next(".main")

    @on(Input.Changed, "#search")
    def _filter_changed(self, message: Input.Changed) -> None:
        self.filter(message.value)

    @on(Input.Submitted, "#search")
    def _filter_done(self, message: Input.Submitted) -> None:
        self._close_search(message.input)

"""The help screen: every key, and the way to the culprit's line."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

HELP: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "From here to the culprit's line: one key",
        (("d", "open the first divergence: its event and the user's source line (enter on a finding does the same)"),),
    ),
    (
        "Everywhere",
        (
            ("1 … 7", "Overview, Weights, Timeline, Event, Parameters, Compare, Explain"),
            ("[ ]", "previous, next recorded step"),
            ("f", "follow the live end: the newest step is shown"),
            ("space", "pause the display (never the training)"),
            ("ctrl+o", "what the command prints (gradcheck run --live)"),
            ("t", "next theme: dark, light, high contrast; all others in the palette"),
            ("ctrl+p", "command palette: screens, themes, screenshot as SVG"),
            ("? q", "this help; quit (never the training; open again at any time); ctrl+c does nothing"),
        ),
    ),
    (
        "Weights",
        (
            ("arrows, click", "move over the cells; below: the weight expected, documented (nominal), observed"),
            ("n", "numbers on or off"),
            ("r c", "what rows and columns are; a merged cell shows the worst of those it stands for"),
            ("/ enter", "search units and ranks; open the cell's way event by event"),
        ),
    ),
    (
        "Timeline",
        (
            ("← → ↑ ↓", "previous, next event; lane above, below"),
            ("+ - 0", "zoom in, out, whole step; shift+arrows pan"),
            ("o j", "to scale or in order; jump to the first divergence"),
            ("enter", "open the event"),
        ),
    ),
    (
        "Event",
        (
            ("← →", "step back and forth: the ledger is replayed event by event"),
            ("k u h", "next contribution, parameter, holder (a rank that holds it)"),
            ("j tab", "jump to where this path goes wrong; tab to the card: ↑ ↓ scroll it"),
            ("escape", "back to the screen from which it was opened"),
        ),
    ),
    ("Parameters", (("enter ← →", "fold, unfold; on a parameter: open its way"), ("/", "search"))),
    ("Compare", (("o x", "next run beside this one; only what differs"),)),
    (
        "Explain",
        (("c e n tab", "copy the fix; write the report as Markdown; next finding; the other side"),),
    ),
    (
        "Signs",
        (
            ("= ▼ ▲ 0 ?", "right, too small, too large, nothing arrived, not known"),
            ("d1 k0 m2", "what data rank 1 gave in accumulation step 0, microbatch 2"),
            ("~1/2", "not measured there: carried on by the factors that the events document"),
            ("● ○ ✗", "rank writes, has ended, is gone"),
        ),
    ),
)


class HelpScreen(ModalScreen[None]):
    """Closes with escape, ? or q."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen VerticalScroll { width: 90%; max-width: 110; height: 90%; border: round $primary; padding: 0 1;
        background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q,enter", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            scroll.border_title = "help"
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True, style="bold")
            table.add_column()
            for title, keys in HELP:
                table.add_row(Text(""), Text(title, "bold underline"))
                for key, words in keys:
                    table.add_row(Text(key), Text(words))
            yield Static(table)

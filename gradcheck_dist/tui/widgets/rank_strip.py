"""Who is alive: a sign a rank, and in words what is wrong with those that are not well."""

from __future__ import annotations

from collections import Counter

from rich.text import Text
from textual.widgets import Static

from gradcheck_dist.reports.text import prose, spans
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.wording import plural

MAX_SIGNS = 64
_SIGNS = {"running": "●", "ended": "○", "waiting": "…", "dead": "✗", "missing": "✗", "unreadable": "✗"}


class RankStrip(Static):
    """One line when all is well, more when not."""

    DEFAULT_CSS = """
    RankStrip { height: auto; max-height: 4; padding: 0 1; }
    RankStrip.trouble { color: $error; }
    """

    _told = Text()

    def show(self, snapshot: Snapshot) -> None:
        """`●` writes, `○` has ended in good order, `✗` is gone."""
        self.display = bool(snapshot.ranks)
        counts = Counter(line.state for line in snapshot.ranks)
        text = Text("ranks ", "bold")
        if len(snapshot.ranks) <= MAX_SIGNS:
            for line in snapshot.ranks:
                text.append(_SIGNS[line.state])
        text.append("  " + ", ".join(f"{count} {state}" for state, count in counts.items()))
        ill = [line for line in snapshot.ranks if line.detail and line.state != "waiting"]
        for line in ill[:2]:
            last = f" (last seen in step {line.last_step})" if line.last_step is not None else ""
            text.append(f"\nrank {line.rank} {line.state}{last}: {prose(line.detail, 200)}", "bold")
        if len(ill) > 2:
            rest = spans(line.rank for line in ill[2:])
            text.append(f"\nand {plural(len(ill) - 2, 'more rank')} in trouble: {prose(rest, 60)}", "bold")
        self.set_class(bool(ill), "trouble")
        if text != self._told:
            self._told = text
            self.update(text)

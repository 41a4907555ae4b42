"""The line below the tabs: which run, which step, who is alive, live or replay."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from gradcheck_dist.reports.text import printable
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.wording import plural


class StatusBar(Static):
    """One line about the run."""

    DEFAULT_CSS = """
    StatusBar { height: 1; background: $surface; color: $foreground; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def show(
        self,
        snapshot: Snapshot,
        *,
        paused: bool,
        follow: bool,
        behind: bool = False,
        command: str = "",
        asked: int | None = None,
    ) -> None:
        """`behind`: something newer waits until the pause ends; `asked`: the step that is to be shown next."""
        text = Text(no_wrap=True, overflow="ellipsis")
        alive = sum(line.state in ("running", "ended") for line in snapshot.ranks)
        still = "WAITING" if snapshot.phase == "waiting" else "REPLAY"
        word = "PAUSED" if paused else "LIVE" if snapshot.live else still
        text.append(f" {word} ", "bold reverse" if paused or snapshot.live else "bold")
        if paused and behind:
            text.append("newer data waits ", "italic")
        if command:
            text.append(f"{command}  ", "bold" if command.islower() else "bold reverse")
        if follow:
            text.append("following ", "bold")
        if snapshot.step is not None:
            last = "" if snapshot.last_step is None else f" (last: {snapshot.last_step})"
            coming = f" → {asked}" if asked is not None and asked != snapshot.step.step else ""
            text.append(f"step {snapshot.step.step}{coming}{last}  ")
            if len(snapshot.judged) < len(snapshot.recorded):
                text.append(f"judged {len(snapshot.judged)} of {len(snapshot.recorded)} steps  ")
        if snapshot.loading:
            text.append(f"{snapshot.loading}  ", "italic")
        if snapshot.ranks:
            well = alive == len(snapshot.ranks)
            text.append(f"ranks {alive}/{len(snapshot.ranks)}  ", "" if well else "bold reverse")
            text.append(f"{plural(snapshot.num_events, 'event')} {snapshot.num_bytes / 1000:.0f} kB  ")
        run = snapshot.report.run if snapshot.report is not None else None
        name = " ".join(part for part in (run.scenario, run.variant) if part) or run.id if run is not None else ""
        text.append(printable(name or snapshot.path, 120), "dim")
        self.update(text, layout=False)

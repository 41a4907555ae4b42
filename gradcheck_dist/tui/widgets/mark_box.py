"""What the event under the cursor of the timeline is."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from gradcheck_dist.reports import timeline
from gradcheck_dist.reports.source import line_text, short_path
from gradcheck_dist.reports.text import printable
from gradcheck_dist.tui.lanes import Mark
from gradcheck_dist.tui.step_view import StepView
from gradcheck_dist.wording import plural


class MarkBox(Static):
    """Three lines about one event, two of legend."""

    DEFAULT_CSS = """
    MarkBox { height: 7; border: round $primary; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def show(self, view: StepView, mark: Mark | None) -> None:
        text = Text(no_wrap=True, overflow="ellipsis")
        if mark is None:
            self.update(text, layout=False)
            return
        culprit = (mark.rank, mark.seq) in view.culprits
        text.append(describe(mark), "bold")
        if culprit:
            text.append("  ← FIRST DIVERGENCE", "bold reverse")
        length = (mark.end_ns - mark.start_ns) / 1e6
        took = f", took {length:.3g} ms" if length else ""
        if took and mark.letter == "F":
            took += " (inferred: a forward ends with its loss and has no event of its own)"
        text.append(f"\nevent {mark.seq} of rank {mark.rank}, {mark.start_ns / 1e6:.4g} ms after the step began{took}")
        if mark.params is not None:
            text.append(f", {plural(len(mark.params), 'parameter')}")
        site = mark.event.site
        if site is not None:
            source = line_text(site.file, site.line)
            text.append(f"\n{short_path(site.file)}:{site.line}", "bold").append(f"  {printable(source or '')}")
        else:
            text.append("\nno source line was recorded", "dim")
        text.append(
            "\nForward Loss-grad Backward Reduce Scale Write Unscale Clip V=clamp Norm Optimizer Zero Pipeline", "dim"
        )
        text.append("\nB0 k=0, B0··· no sync, F┄┄┄ inferred from its end; plain: off the path", "dim")
        self.update(text, layout=False)


def describe(mark: Mark) -> str:
    """An event in a few words."""
    return f"{mark.name} {timeline.describe(mark.event)}".strip()

"""What the event under the cursor of the timeline is."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from gradcheck_dist.reports.source import line_text, short_path
from gradcheck_dist.reports.text import printable, spans
from gradcheck_dist.tui.step_view import Mark, StepView


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
        text.append(f"\nevent {mark.seq} of rank {mark.rank}, {mark.start_ns / 1e6:.4g} ms after the step began{took}")
        if mark.params is not None:
            text.append(f", {len(mark.params)} parameters")
        site = mark.event.site
        if site is not None:
            source = line_text(site.file, site.line)
            text.append(f"\n{short_path(site.file)}:{site.line}", "bold").append(f"  {printable(source or '')}")
        else:
            text.append("\nno source line was recorded", "dim")
        text.append("\nForward Loss-gradient Backward Reduce Scale Unscale Clip Optimizer Zero Pipeline", "dim")
        text.append("\nB0 = accumulation step 0, B0··· = no sync; plain: not on the selected path", "dim")
        self.update(text, layout=False)


def describe(mark: Mark) -> str:
    """An event in a few words."""
    event, words = mark.event, [mark.name]
    op = getattr(event, "op", None)
    if mark.letter == "R":
        words.append(f"{printable(event.impl)} {printable(str(op))} over [{spans(event.group)}]")  # type: ignore[attr-defined]
    if mark.accumulation_step is not None:
        words.append(f"k={mark.accumulation_step}")
    if mark.microbatch:
        words.append(f"m={mark.microbatch}")
    if mark.stage is not None:
        words.append(f"stage {mark.stage}")
    if mark.sync is not None:
        words.append("sync" if mark.sync else "no sync")
    return " ".join(words)

"""What one event did to the gradient, with the user's source and the ledger right after it."""

from __future__ import annotations

from collections import Counter

from rich.text import Text
from textual.widgets import Static

from gradcheck_dist.diagnosis.finding import Finding, FirstEvent
from gradcheck_dist.diagnosis.weights.cells import Cell
from gradcheck_dist.events import (
    WRITTEN,
    AmpScale,
    AmpUnscale,
    Clip,
    GradientNorm,
    GradWrite,
    Loss,
    LossGradient,
    OptimizerStep,
    Reduce,
    ScaleGrads,
)
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.reports.culprit import culprit as in_words
from gradcheck_dist.reports.culprit import end_of, last_line_of
from gradcheck_dist.reports.source import Excerpt, excerpt, modified_s, short_path
from gradcheck_dist.reports.text import by_line, clip, number, printable, prose, spans
from gradcheck_dist.tui import scale
from gradcheck_dist.tui.lanes import Mark
from gradcheck_dist.tui.step_view import Stop
from gradcheck_dist.tui.widgets.mark_box import describe
from gradcheck_dist.wording import plural

MAX_LEDGER = 64
NARROW = 70
"""On fewer columns the card lies below the path, not beside it."""


class EventCard(Static):
    """Title, source, factors, ledger."""

    DEFAULT_CSS = "EventCard { height: auto; padding: 0 1; }"

    def show(
        self,
        mark: Mark | None,
        stop: Stop | None,
        cell: Cell | None,
        ledger: list[tuple[Cell, float | None]],
        *,
        culprit: FirstEvent | None,
        finding: Finding | None = None,
        beside: bool = True,
    ) -> None:
        """`beside`: the path stands on its left."""
        text = Text()
        if mark is None and culprit is None:
            self.update(Text("This stop is a sample without a recorded event.", "dim"))
            return
        width = self.app.size.width - (38 if beside else 4)
        if mark is not None:
            text.append(describe(mark), "bold")
            text.append(f"  event {mark.seq} of rank {mark.rank}\n", "dim")
        if culprit is not None:
            between = f"between this and {end_of(culprit)}, by nothing that was recorded"
            known = "after this the weight could not come right" if stop is not None else "seen here, and in no weight"
            if stop is not None and cell is not None and cell.right:
                known = "seen here; the weight of this contribution is right"
            words = between if culprit.unrecorded else known
            text.append(f"FIRST DIVERGENCE: {words}\n", "bold reverse")
        if mark is not None:
            if culprit is not None and culprit.written is not None:  # wrong by that line, not where it was evaluated
                _told(text, culprit, width)
            else:
                _source(text, mark, width, last_line_of(culprit) if culprit is not None else None)
            for fact in _facts(mark):
                text.append(f"{fact}\n")
        elif culprit is not None:  # the verdict knows of it, and the step that is shown was judged without it
            _told(text, culprit, width)
        if stop is not None:
            _factors(text, stop, cell)
        if ledger:
            text.append("\nledger after this event: observed/expected of every contribution\n", "bold")
            _ledger(text, ledger)
        if finding is not None and culprit is not None:
            if stop is None:
                text.append("\nwhat was found\n", "bold").append(f"{prose(finding.explanation)}\n")
            if finding.consequence:
                text.append("\nwhat it means for this run\n", "bold").append(f"{by_line(finding.consequence)}\n")
        self.update(text)


def _source(text: Text, mark: Mark, width: int, until: int | None) -> None:
    site = mark.event.site
    if site is None:
        text.append("no source line was recorded\n", "dim")
        return
    text.append(f"{short_path(site.file)}:{site.line}", "bold").append(f" in {printable(site.function, 60)}\n")
    shown = excerpt(site.file, site.line, until=until)
    if shown is None:
        text.append("  (the file is not below the working directory: its lines are not shown)\n", "dim")
        return
    if (modified_s(site.file) or 0.0) > mark.event.t_ns / 1e9:
        text.append("the file was changed after this was recorded: its lines may have moved\n", "italic")
    _lines(text, shown, width)


def _told(text: Text, event: FirstEvent, width: int) -> None:
    told = in_words(event)
    text.append(f"{told.line}\n", "bold")
    if told.excerpt is not None:
        _lines(text, told.excerpt, width)
    for fact in told.facts:
        text.append(f"{fact}\n")


def _lines(text: Text, shown: Excerpt, width: int) -> None:
    for marked, line, source in shown.numbered():
        row = clip(f"{'▶' if marked else ' '} {line:>4} │ {source}", width)
        text.append(row, "bold reverse" if marked else "dim").append("\n")


def _facts(mark: Mark) -> list[str]:
    event, facts = mark.event, []
    if isinstance(event, Reduce):
        facts.append(f"op {printable(event.op)} by {printable(event.impl)} over ranks [{spans(event.group)}]")
        divides = {"pre-divide": event.pre_divide, "post-divide": event.post_divide, "premul": event.premul}
        facts += [f"{name} {number(value)}" for name, value in divides.items() if value is not None]
        if event.replicate_group:
            facts.append(f"replicas [{spans(event.replicate_group)}] {printable(str(event.replicate_op))}")
        if event.hook:
            facts.append(f"communication hook {printable(event.hook, 100)}")
    elif isinstance(event, ScaleGrads):
        facts.append(f"divides the accumulated gradients by {event.divisor:g}")
    elif isinstance(event, GradWrite):
        by = f"by {number(event.factor)}" if event.factor is not None else "by no one number"
        done = "writes into gradients" if event.op == WRITTEN else f"multiplies gradients {by}"
        facts.append(f"a line of the trainer's {done}")
    elif isinstance(event, AmpScale):
        facts.append(f"multiplies by the loss scale {event.scale:g}")
    elif isinstance(event, AmpUnscale):
        facts.append(f"divides by the loss scale {event.scale:g}" + (", found inf" if event.found_inf else ""))
    elif isinstance(event, Clip):
        share = " (this rank's share only)" if event.partial else ""
        facts.append(f"total norm {number(event.total_norm)}{share}, max norm {number(event.max_norm)}")
        facts.append(f"coefficient {number(event.coefficient)}: scales all alike, so ratios are freed of it")
    elif isinstance(event, Loss):
        facts.append(f"{printable(event.op)} reduction {printable(event.reduction)} over {_tokens(event.num_tokens)}")
        facts.append(f"value {number(event.value)}, term {printable(event.term, 40)}")
    elif isinstance(event, LossGradient):
        facts.append(f"one token weighs {number(event.weight)} in the loss, {_tokens(event.num_tokens)}")
        for one in event.numbers or ():
            facts.append(f"multiplied by {number(one.factor)} at {printable(one.site.short)}: {printable(one.written)}")
    elif isinstance(event, GradientNorm):
        facts.append("the trainer takes the norm of gradients")
    elif isinstance(event, OptimizerStep):
        rate = f", lr {event.lr:g}" if event.lr is not None else ""
        facts.append(f"{printable(event.optimizer, 60)} reads the gradients{rate}")
    return facts


def _tokens(count: int | None) -> str:
    return "tokens that were not counted" if count is None else plural(count, "token")


def _factors(text: Text, stop: Stop, cell: Cell | None) -> None:
    right = cell is not None and abs(stop.after - 1) <= cell.tolerance
    measured = f"measured {number(stop.measured)}" if stop.measured is not None else "not measured here"
    nominal = number(stop.nominal) if stop.nominal is not None else "unknown"
    text.append("factor: documented ").append(nominal, "bold").append(", ").append(measured, "bold")
    text.append("\nratio: before ").append(f" {scale.short(stop.before)} ", scale.style(stop.before, _one(stop.before)))
    text.append(" after ").append(f" {scale.short(stop.after)} ", scale.style(stop.after, right or _one(stop.after)))
    if cell is not None:
        text.append(f"  tolerance {cell.tolerance:.1g}", "dim")
    text.append("\n" if stop.sampled else "  (carried on by documented factors)\n", "dim")


def _one(ratio: float) -> bool:
    return abs(ratio - 1) < 1e-3


def _ledger(text: Text, ledger: list[tuple[Cell, float | None]]) -> None:
    sizes = Counter(cell.key for cell, _ in ledger)
    seen: Counter[ContributionKey] = Counter()
    for cell, ratio in ledger[:MAX_LEDGER]:
        data_rank, step, microbatch = cell.key
        seen[cell.key] += 1
        summand = f"summand {seen[cell.key]} of {sizes[cell.key]}  " if sizes[cell.key] > 1 else ""
        text.append(f"  d{data_rank} k{step} m{microbatch}  {summand}")
        if ratio is None:
            text.append("not yet\n", "dim")
        else:
            text.append(f" {scale.short(ratio):<7}", scale.style(ratio, abs(ratio - 1) <= max(cell.tolerance, 1e-4)))
            text.append("\n")
    if len(ledger) > MAX_LEDGER:
        text.append(f"  and {len(ledger) - MAX_LEDGER} more: see the Weights screen\n", "dim")

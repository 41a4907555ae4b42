"""The culprit event in words: its line, what is known about it, and the source around it."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_dist.diagnosis.finding import Finding, FirstEvent, Report
from gradcheck_dist.reports.source import Excerpt, excerpt, short_path
from gradcheck_dist.reports.text import number, printable, some, spans
from gradcheck_dist.wording import plural

ALL_PARAMETERS = "all parameters"
KINDS = {"exchange": "activations exchanged", "gradient_check": "checked by central differences"}
"""Events whose kind is no word of who writes a trainer."""


@dataclass(frozen=True)
class Culprit:
    """Where it happened: one line to find it, what is known about the event, and the source around it."""

    line: str
    facts: tuple[str, ...]
    excerpt: Excerpt | None
    path: str | None = None
    line_number: int = 1


def whereabouts(report: Report) -> str:
    """Where the first finding happened: the culprit's line, or the two that enclose it, and in which parameters where
    not in all. Empty where there is none."""
    if report.verdict != "findings" or not report.findings or report.findings[0].first_event is None:
        return ""
    finding, event = report.findings[0], report.findings[0].first_event
    place = f"between {_at(event.file, event.line, _operation(event))} and {end_of(event)}"
    if not event.unrecorded:
        place = _line(event)
        if event.called_from:  # a line of an installed package: the program's own tells more
            place += f", called from {_site(event.called_from)}"
    total = report.coverage.parameters_total
    if 0 < finding.num_parameters < total:
        place += f"; {finding.num_parameters} of {plural(total, 'parameter')} ({units_of(finding, total)})"
    return place


def units_of(finding: Finding, total: int) -> str:
    """Which of `total` parameters a finding concerns. Of several optimizers that step in turns, all that one reads are
    all parameters of its steps, and not of the run."""
    if finding.units == [ALL_PARAMETERS] and finding.num_parameters < total:
        steps = finding.steps or [finding.step]
        return f"all that {'step' if len(steps) == 1 else 'steps'} {spans(steps)} read"
    return some(finding.units)


def culprit(event: FirstEvent) -> Culprit:
    """The culprit event in words, with its source where it may be shown."""
    place = [f"rank {event.rank}"]
    place += [f"accumulation step {event.accumulation_step}"] if event.accumulation_step is not None else []
    place += [f"microbatch {event.microbatch}"] if event.microbatch is not None else []
    place += [f"stage {event.stage}"] if event.stage is not None else []
    facts = ["first on " + ", ".join(place)]
    by_itself = "written" if event.kind == "grad_write" else "documented"
    measured = event.observed_factor if event.kind != "loss" else None  # it begins the gradient: nothing is multiplied
    factors = {by_itself: event.nominal_factor, "measured": measured}
    told = [f"{number(factor)} as {how}" for how, factor in factors.items() if factor is not None]
    if told:
        facts.append(f"multiplies by {', '.join(told)}")
    for how, site in (
        ("called from", event.called_from),
        ("configured at", event.configured_at),
        ("evaluated at", event.evaluated_at),
    ):
        if site:
            facts.append(f"{how} {_site(site)}")
    if event.unrecorded:
        facts.append(f"nothing that was recorded did it: it happened after this event and before {end_of(event)}")
    path = short_path(event.file) if event.file else None
    shown = excerpt(event.file, event.line, until=last_line_of(event))
    if event.file and shown is None:
        facts.append("its lines are not shown: no such file lies below the folder in which this was written")
    return Culprit(
        _line(event),
        tuple(facts),
        shown,
        path,
        max(1, event.line or 1),
    )


def _line(event: FirstEvent) -> str:
    place = f"{short_path(event.file)}:{event.line}" if event.file else "no source line was recorded"
    return f"{place}  {_operation(event)}"


def _site(site: str) -> str:
    file, colon, line = site.rpartition(":")
    return f"{short_path(file)}{colon}{printable(line)}"


def _operation(event: FirstEvent) -> str:
    group = f" over group [{spans(event.group)}]" if event.group else ""
    does = event.written or event.op
    operation = f" {printable(does)}" if does else ""
    return f"{KINDS.get(event.kind) or printable(event.kind)}{operation}{group}"


def _at(file: object, line: object, name: str) -> str:
    return f"{short_path(str(file))}:{line} ({name})" if file and isinstance(line, int) else name


def end_of(event: FirstEvent) -> str:
    """The event that already found a change which nobody recorded."""
    before = event.before or {}
    return _at(before.get("file"), before.get("line"), printable(str(before.get("kind", "the next recorded event"))))


def last_line_of(event: FirstEvent) -> int | None:
    """The line by which an unrecorded change had happened, where it is in the culprit's file."""
    end = (event.before or {}) if event.unrecorded else {}
    line = end.get("line") if end.get("file") == event.file else None
    return line if isinstance(line, int) else None

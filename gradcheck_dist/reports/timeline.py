"""What happened when: the events of a run as lanes, one a rank, for the figure, the tables and Perfetto."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import (
    AmpScale,
    AmpUnscale,
    Backward,
    Clip,
    ClipValue,
    Event,
    GradientNorm,
    GradWrite,
    Loss,
    LossGradient,
    OptimizerStep,
    PipelineStep,
    Reduce,
    ScaleGrads,
    StepEnd,
    ZeroGrad,
)
from gradcheck_dist.reports.figure import COLOURS, Figure, label, layout
from gradcheck_dist.reports.text import printable
from gradcheck_dist.reports.weights import shown_step
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import plural

MAX_LANES = 16
MAX_SPANS = 4000
KINDS: dict[str, type[Event]] = {
    "loss": Loss,
    "loss_gradient": LossGradient,
    "backward": Backward,
    "reduce": Reduce,
    "scale_grads": ScaleGrads,
    "grad_write": GradWrite,
    "amp_scale": AmpScale,
    "amp_unscale": AmpUnscale,
    "clip": Clip,
    "clip_value": ClipValue,
    "gradient_norm": GradientNorm,
    "optimizer_step": OptimizerStep,
    "zero_grad": ZeroGrad,
    "pipeline_step": PipelineStep,
    "step_end": StepEnd,
}
NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Span:
    """An event in time. `start_ns` is the wall clock of the rank's machine; an instant has `duration_ns` 0."""

    rank: int
    seq: int
    step: int
    kind: str
    text: str
    start_ns: int
    duration_ns: int
    site: str


def spans(run: Run, step: int | None = None, culprits: Collection[tuple[int, int]] = ()) -> Iterator[Span]:
    """All events with a place in time, rank by rank; of one step only when it is given. `culprits`: rank and seq of
    events that have a place whatever they are."""
    for rank, trace in sorted(run.ranks.items()):
        for event in trace.events:
            shown = type(event) in NAMES or (rank, event.seq) in culprits
            if not shown or not event.t_ns or (step is not None and event.step != step):
                continue
            duration = duration_ns(event)
            site = f"{event.site.file}:{event.site.line}" if event.site else ""
            start = event.t_ns - duration
            yield Span(rank, event.seq, event.step, kind_of(event), describe(event), start, duration, site)


def kind_of(event: Event) -> str:
    """The kind of an event as a trace names it."""
    return str(type(event).__struct_config__.tag)


def places_of_culprits(report: Report) -> dict[tuple[int, int], str]:
    """The codes of the findings by rank and seq of their first event."""
    return {(one.first_event.rank, one.first_event.seq): one.code for one in report.findings if one.first_event}


def duration_ns(event: Event) -> int:
    """How long it lasted; 0 for an instant. An event's own time is its end."""
    if isinstance(event, Backward):
        return max(0, event.duration_ns)
    if isinstance(event, StepEnd):
        return max(0, int(event.duration_s * 1e9))
    return 0


def describe(event: Event) -> str:
    """An event in a few words."""
    place = [f"k={event.accumulation_step}"] if hasattr(event, "accumulation_step") else []
    place += [f"m={event.microbatch}"] if hasattr(event, "microbatch") else []
    stage = getattr(event, "stage", None)
    place += [f"stage {stage}"] if stage is not None else []
    what = ""
    if isinstance(event, Reduce):
        what = f"{event.impl} {event.op} over {plural(len(event.group), 'rank')}"
    elif isinstance(event, Loss):
        tokens = "" if event.num_tokens is None else f", {plural(event.num_tokens, 'token')}"
        what = f"{event.term} {event.reduction}{tokens}"
    elif isinstance(event, LossGradient):
        what = f"weight {event.weight:.6g}"
    elif isinstance(event, ScaleGrads):
        what = f"/ {event.divisor:.6g}"
    elif isinstance(event, GradWrite):
        what = "to .grad" if event.factor is None else f"x {event.factor:.6g}"
    elif isinstance(event, Clip):
        what = f"norm {event.total_norm:.6g} x {event.coefficient:.6g}"
    elif isinstance(event, AmpScale):
        what = f"x {event.scale:.6g}"
    elif isinstance(event, AmpUnscale):
        what = f"/ {event.scale:.6g}"
    elif isinstance(event, OptimizerStep):
        what = event.optimizer
    elif isinstance(event, PipelineStep):
        what = f"{event.schedule}, {plural(event.num_microbatches, 'microbatch')}"
    elif isinstance(event, Backward) and event.sync is False:
        what = "no sync"
    return printable(" ".join([what, *place]).strip(), 160)


def timeline_figure(report: Report, run: Run) -> Figure | None:
    """The shown step as lanes; None when no event of it has a time."""
    step = shown_step(report)
    if step is None:
        step = min((event.step for trace in run.ranks.values() for event in trace.events), default=0)
    ranks = sorted(run.ranks)
    chosen = chosen_ranks(ranks, report)
    culprits = places_of_culprits(report)
    found = [span for span in spans(run, step, culprits) if span.rank in chosen and span.kind != "step_end"]
    if not found:
        return None
    shown = found[:: -(-len(found) // MAX_SPANS)]
    origin = min(span.start_ns for span in shown)
    traces = []
    kinds = dict.fromkeys([*KINDS, *(span.kind for span in shown)])
    for index, kind in enumerate(kind for kind in kinds if any(span.kind == kind for span in shown)):
        traces.append(_trace(kind, [span for span in shown if span.kind == kind], origin, COLOURS[index % 8]))
    marked = [span for span in found if (span.rank, span.seq) in culprits]
    if marked:
        traces.append(_culprits(marked, origin))
    notes = []
    num_ranks = max(len(ranks), report.run.world_size)
    if len(chosen) < num_ranks:
        notes.append(f"{len(chosen)} of {num_ranks} ranks are shown, those with a culprit first.")
    if len(shown) < len(found):
        notes.append(f"{len(shown)} of {len(found)} events are shown.")
    if len(ranks) > 1:
        notes.append("Clocks of different machines may differ.")
    height = max(200, 34 * len(chosen) + 140)
    lanes = {"type": "category", "categoryorder": "array", "categoryarray": [_lane(rank) for rank in chosen[::-1]]}
    return Figure(
        "timeline",
        f"Timeline of step {step}",
        f"{plural(len(found), 'event')} on {plural(len(chosen), 'rank')}, backward passes as bars.",
        {"data": traces, "layout": layout("ms since the first event", "", height, yaxis=lanes, barmode="overlay")},
        " ".join(notes),
    )


def chosen_ranks(ranks: Sequence[int], report: Report) -> list[int]:
    """The ranks that are shown: those with a culprit, then evenly over all."""
    wanted = [finding.first_event.rank for finding in report.findings if finding.first_event]
    wanted += ranks[:: -(-len(ranks) // MAX_LANES)]
    present = set(ranks)
    return sorted(list(dict.fromkeys(rank for rank in wanted if rank in present))[:MAX_LANES])


def _lane(rank: int) -> str:
    return f"rank {rank}"


def _trace(kind: str, some: list[Span], origin: int, colour: str) -> dict[str, Any]:
    base = {
        "name": kind,
        "y": [_lane(span.rank) for span in some],
        "text": [label(span.text, 160) for span in some],
        "hovertemplate": "%{y} " + kind + "<br>%{text}<extra></extra>",
        "marker": {"color": colour},
    }
    start = [(span.start_ns - origin) / 1e6 for span in some]
    if kind != "backward":
        return base | {"type": "scatter", "mode": "markers", "x": start, "marker": {"color": colour, "size": 9}}
    width = [max(span.duration_ns / 1e6, 0.01) for span in some]
    return base | {"type": "bar", "orientation": "h", "base": start, "x": width, "width": 0.5, "textposition": "none"}


def _culprits(some: list[Span], origin: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "culprit",
        "x": [(span.start_ns - origin) / 1e6 for span in some],
        "y": [_lane(span.rank) for span in some],
        "text": [label(f"{span.kind} {span.text}", 160) for span in some],
        "hovertemplate": "culprit: %{text}<extra></extra>",
        "marker": {"symbol": "circle-open", "size": 20, "color": "#b3261e", "line": {"width": 3}},
    }

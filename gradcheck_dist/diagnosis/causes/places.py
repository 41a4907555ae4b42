"""Where events happened, as far as that tells one hand from another."""

from __future__ import annotations

from gradcheck_dist.events import Backward, Event, LossGradient, PipelineStep, Reduce, ScaleGrads


def kind_of(event: Event) -> str:
    return "loss" if isinstance(event, LossGradient) else str(event.__struct_config__.tag)


def line_of(event: Event) -> tuple[str, int] | None:
    return (event.site.file, event.site.line) if event.site is not None else None


def caller_of(event: Event) -> tuple[str, int | str] | None:
    """The line of an event. Of a schedule, and of wrappers that reduce in it, the function, and a divisor: the first
    stage steps it with inputs, the last with targets, each on a line of its own."""
    if event.site is not None and event.site.function:
        if isinstance(event, ScaleGrads):
            return (event.site.file, f"{event.site.function} / {event.divisor:g}")
        if isinstance(event, PipelineStep) or (isinstance(event, Backward) and event.stage is not None):
            return (event.site.file, f"{event.site.function} of stages")
        if isinstance(event, Reduce) and event.scheduled and event.wrapper is not None:
            return (event.site.file, f"{event.site.function} of stages")
    return line_of(event)

"""Clips that act on gradients which are not complete yet."""

from __future__ import annotations

from gradcheck_dist.diagnosis.audits.facts import StepFacts
from gradcheck_dist.diagnosis.norms.step_norms import ClipCall
from gradcheck_dist.events import Backward, Event, OptimizerStep, Reduce, ZeroGrad


def completed_by(facts: StepFacts, call: ClipCall) -> Event | None:
    """What still changed the clipped gradients before an optimizer read them or they were emptied."""
    clipped = set(facts.data.params_of(call.rank, call.event.params))
    for event in facts.data.events[call.rank]:
        if event.seq <= call.event.seq or not isinstance(event, Backward | Reduce | OptimizerStep | ZeroGrad):
            continue
        if event.params is None or not clipped & set(facts.data.params_of(call.rank, event.params)):
            continue
        if isinstance(event, Reduce) and len(event.group) * (len(event.replicate_group) or 1) == 1:
            continue
        return event if isinstance(event, Backward | Reduce) else None
    return None

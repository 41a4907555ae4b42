"""Losses that were declared where no backward pass goes through: they tell nothing, and the program should know."""

from __future__ import annotations

from gradcheck_dist.events import Backward, Loss, LossGradient
from gradcheck_dist.ledger.tracks import StepData

MARKED = "mark_loss"
"""Op of a declared loss: probes/session.py."""
ASIDE = "that no backward pass went through"
ON_THE_WAY = "total = mark_loss(losses.sum(), n); (total / n).backward()"


def marked_aside(data: StepData) -> str:
    """Which declared loss a step's backward passes left aside, in words; empty where none, or some were gone through.

    A sum that is made for `mark_loss` alone is a tensor of its own, beside the one that backward begins with.
    """
    place = ""
    for events in data.events.values():
        reached = {event.loss_id for event in events if isinstance(event, LossGradient)}
        declared = [event for event in events if isinstance(event, Loss) and event.op == MARKED]
        if any(event.loss_id in reached for event in declared):
            return ""
        aside = [event for event in declared if event.requires_grad]
        if aside and not place and any(isinstance(event, Backward) for event in events):
            site = aside[0].site
            place = f" at {site.short}" if site is not None else ""
            place = f"mark_loss{place} was given a tensor {ASIDE}: compute the loss from it, as in {ON_THE_WAY}"
    return place

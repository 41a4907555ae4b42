"""Losses that were declared where no backward pass goes through: they tell nothing, and the program should know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradcheck_dist.events import Backward, Event, Loss, LossGradient
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.terms import MAIN
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


def declared_terms(data: StepData) -> list[str]:
    """The names of the auxiliary terms of a step."""
    losses = (event for events in data.events.values() for event in events if isinstance(event, Loss))
    return sorted({loss.term for loss in losses} - {MAIN})


def without_declared(contributions: Contributions, events: Mapping[int, Sequence[Event]]) -> Contributions | None:
    """The contributions as their losses weigh without the coefficients that mark_loss declares of them: what else
    stands before a loss divides. None where one has several losses, or one whose coefficient nobody declared."""
    declared = {
        (rank, event.loss_id): event.coefficient
        for rank, of_rank in events.items()
        for event in of_rank
        if isinstance(event, Loss) and event.term == MAIN and event.coefficient
    }
    if not declared:
        return None
    by_key = dict(contributions.by_key)
    for key, one in contributions.by_key.items():
        if one.num_tokens == 0:
            continue
        number = (
            declared.get((one.loss_rank, one.gradient.loss_id)) if one.gradient and one.loss_rank is not None else None
        )
        if number is None or one.num_losses != 1 or one.weight is None:
            return None
        by_key[key] = replace(one, weight=one.weight / number)
    return replace(contributions, by_key=by_key)

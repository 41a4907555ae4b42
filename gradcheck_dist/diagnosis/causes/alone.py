"""Reductions over one rank that divide as if more had joined.

A wrapper that was given a group of one rank, or takes one of several for its own (FSDP1's HYBRID_SHARD whose shards are
of one rank), brings no other rank's gradient and divides by the ranks that it means. That is one fault: with the group
that it divides for, the reduction would be an average, and what passes before had left would come out of it as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import Event, Reduce


def is_alone(event: Event | None) -> bool:
    """Whether a reduction joins one rank."""
    return isinstance(event, Reduce) and len(set(event.group)) == 1 and not event.replicate_group


def divides_alone(event: Event | None) -> float:
    """What a reduction over one rank divides by; 1 where it does not, or joins more."""
    if not isinstance(event, Reduce) or not is_alone(event):
        return 1.0
    return (event.pre_divide or 1.0) * (event.post_divide or 1.0)


def reduced_alone(held: Sequence[Held]) -> list[Reduce]:
    """The reductions of some gradients on the ranks that hold them, where all of these join one rank alone."""
    found = [entry.event for one in held for entry in one.replay.history(one.rank) if isinstance(entry.event, Reduce)]
    return found if all(is_alone(event) for event in found) else []


def without_divisions_alone(cases: list[Case]) -> list[Case]:
    """The same without what such a division did to gradients that lack a reduction anyway."""
    lacking = {(held.param, rank) for case in cases if case.culprit.absent for held in case.held for rank in held.ranks}
    return [
        case
        for case in cases
        if divides_alone(case.event) <= 1 or any((held.param, held.rank) not in lacking for held in case.held)
    ]

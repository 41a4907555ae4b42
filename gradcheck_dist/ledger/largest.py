"""Losses of which the largest are taken (hard examples, arXiv:1604.03540), some of which may have no label.

A mean over the k largest divides by k, whether or not k tokens have a label: those that have none fill it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from gradcheck_dist.events import Event, LossGradient
from gradcheck_dist.ledger.tracks import StepData


def filled_up(data: StepData) -> Iterator[tuple[int, LossGradient]]:
    """By rank, the losses among whose largest elements are some without a label."""
    for rank, of_rank in data.events.items():
        for event in of_rank:
            if isinstance(event, LossGradient) and (event.num_picked or 0) > (event.num_tokens or 0):
                yield rank, event


def with_picked(data: StepData) -> StepData:
    """The same step, in which each of the largest elements counts as a token."""
    more = {(rank, event.seq): event for rank, event in filled_up(data)}

    def counted(rank: int, event: Event) -> Event:
        one = more.get((rank, event.seq))
        return msgspec.structs.replace(one, num_tokens=one.num_picked) if one is not None else event

    return replace(data, events={rank: [counted(rank, one) for one in found] for rank, found in data.events.items()})


def told_picked(data: StepData) -> str:
    """What the largest elements are counted as, in words."""
    fewest = min((event for _, event in filled_up(data)), key=lambda one: (one.num_tokens or 0) / (one.num_picked or 1))
    where = f" ({fewest.site.short})" if fewest.site is not None else ""
    return (
        f"step {data.step}: of the {fewest.num_picked} largest losses of a pass, {fewest.num_tokens or 0} have a "
        f"label{where}. Weights are right where those without one, whose loss is zero, fill the mean up; if a mean "
        "over those with a label is meant, leave the others out before the largest are taken"
    )

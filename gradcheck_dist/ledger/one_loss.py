"""Ranks that hold parts of one model and have one loss, as the numbers tell that backward begins at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from gradcheck_dist.events import GATHERED, Event, Reduce, RootValue
from gradcheck_dist.ledger.moved import plain_name
from gradcheck_dist.ledger.tracks import StepData


def with_one_loss(data: StepData) -> set[tuple[int, int]]:
    """The pairs of ranks whose passes begin at the same numbers, bit by bit, and of which each holds tensors that the
    other does not: batches of their own give other losses. Whole numbers alone tell nothing. Ranks that reduce
    gradients besides may have batches of their own and a loss on all of these (a contrastive one)."""
    began = {rank: _began_at(events) for rank, events in data.events.items()}
    told = sorted(rank for rank, roots in began.items() if not all(value.is_integer() for _, value in roots))
    return {
        (one, other)
        for one, other in combinations(told, 2)
        if began[one] == began[other] and _hold_parts(data, one, other) and not _reduce_together(data, one, other)
    }


def _began_at(events: Sequence[Event]) -> list[tuple[tuple[int, int], float]]:
    roots = (event for event in events if isinstance(event, RootValue))
    return [((root.accumulation_step, root.microbatch), root.value) for root in roots]


def _hold_parts(data: StepData, one: int, other: int) -> bool:
    parts = [of_rank for (_, name), of_rank in data.tracks.items() if plain_name(name) != name]
    alone = [{rank for rank in (one, other) if rank in of_rank} for of_rank in parts]
    return {one} in alone and {other} in alone


def _reduce_together(data: StepData, one: int, other: int) -> bool:
    return any(
        isinstance(event, Reduce) and event.impl != GATHERED and {one, other} <= {*event.group, *event.replicate_group}
        for event in data.events[one]
    )

"""Ranks that hold parts of one model and have one loss, as the numbers tell that backward begins at."""

from __future__ import annotations

from gradcheck_dist.events import GATHERED, Reduce, RootValue
from gradcheck_dist.ledger.moved import plain_name
from gradcheck_dist.ledger.tracks import StepData


def have_one_loss(data: StepData, one: int, other: int) -> bool:
    """Whether the passes of two ranks begin at the same numbers, bit by bit, and each holds tensors that the other does
    not: batches of their own give other losses. Ranks that reduce gradients besides may have batches of their own and a
    loss on all of these (a contrastive one)."""
    mine, theirs = _began_at(data, one), _began_at(data, other)
    if not mine or mine != theirs or all(value.is_integer() for _, value in mine):
        return False
    return _hold_parts(data, one, other) and not _reduce_together(data, one, other)


def _began_at(data: StepData, rank: int) -> list[tuple[tuple[int, int], float]]:
    roots = (event for event in data.events[rank] if isinstance(event, RootValue))
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

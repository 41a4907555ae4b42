"""Ranks that hold parts of one model and have one loss, as the numbers tell that backward begins at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from gradcheck_dist.events import GATHERED, Event, Reduce, RootValue
from gradcheck_dist.ledger.moved import plain_name
from gradcheck_dist.ledger.repeated_batches import batches_given, exchange
from gradcheck_dist.ledger.tracks import StepData, Track

NOBODY = -1
"""In the place of a parameter's id: a reduction of what is no known parameter's gradient."""
ROUNDING = 1e-3
"""Relative difference of two elements of one gradient, as ranks compute it in orders of their own."""


def with_one_loss(data: StepData) -> set[tuple[int, int]]:
    """The pairs of ranks whose passes begin at the same numbers, bit by bit, and of which each holds tensors, or other
    elements of a DTensor, that the other does not: batches of their own give other losses. Whole numbers alone tell
    nothing. Ranks that reduce gradients besides may have batches of their own and a loss on all of these (a contrastive
    one), unless these are of vectors alone (norms under sequence parallelism), or some matrix got one gradient on both
    without it. Nor have ranks that are given one batch and combine activations, also where their shards have one name
    and shape."""
    began = {rank: _began_at(events) for rank, events in data.events.items()}
    told = sorted(rank for rank, roots in began.items() if not all(value.is_integer() for _, value in roots))
    return {
        (one, other)
        for one, other in combinations(told, 2)
        if began[one] == began[other]
        and (_hold_parts(data, one, other) or _hold_other_values(data, one, other))
        and (not _reduce_together(data, one, other) or _work_on_one_batch(data, one, other))
    }


def _work_on_one_batch(data: StepData, one: int, other: int) -> bool:
    """Whether both ranks' models were given the same in every pass, and activations go between the two."""
    given = batches_given(data, one)
    return bool(given) and given == batches_given(data, other) and exchange(data, one, other)


def _hold_other_values(data: StepData, one: int, other: int) -> bool:
    """Whether the two ranks began with other values of a matrix of one name and shape."""
    both = [of_rank for of_rank in data.tracks.values() if one in of_rank and other in of_rank]
    matrices = [(of_rank[one].begun, of_rank[other].begun) for of_rank in both if len(of_rank[one].param.shape) > 1]
    return any(
        mine is not None and theirs is not None and not np.array_equal(mine, theirs, equal_nan=True)
        for mine, theirs in matrices
    )


def _began_at(events: Sequence[Event]) -> list[tuple[tuple[int, int], float]]:
    roots = (event for event in events if isinstance(event, RootValue))
    return [((root.accumulation_step, root.microbatch), root.value) for root in roots]


def _hold_parts(data: StepData, one: int, other: int) -> bool:
    parts = [of_rank for (_, name), of_rank in data.tracks.items() if plain_name(name) != name]
    alone = [{rank for rank in (one, other) if rank in of_rank} for of_rank in parts]
    if {one} in alone and {other} in alone:
        return True
    both = (of_rank for of_rank in data.tracks.values() if one in of_rank and other in of_rank)
    return any(_hold_shards(of_rank[one], of_rank[other]) for of_rank in both)


def _hold_shards(mine: Track, theirs: Track) -> bool:
    """Whether the two ranks got gradients of elements that the other did not."""
    pairs = [(mine.leaves[slot][1].data, theirs.leaves[slot][1].data) for slot in mine.leaves.keys() & theirs.leaves]
    known = [(~np.isnan(first), ~np.isnan(second)) for first, second in pairs]
    return bool(known) and all(first.any() and second.any() and not (first & second).any() for first, second in known)


def _reduce_together(data: StepData, one: int, other: int) -> bool:
    reduced = {
        id
        for event in data.events[one]
        if isinstance(event, Reduce)
        and event.impl != GATHERED
        and {one, other} <= {*event.group, *event.replicate_group}
        for id in data.params_of(one, event.params) or (NOBODY,)
    }
    both = (of_rank for of_rank in data.tracks.values() if one in of_rank and other in of_rank)
    matrices = [of_rank for of_rank in both if len(of_rank[one].param.shape) > 1]
    if NOBODY not in reduced and not any(of_rank[one].param.id in reduced for of_rank in matrices):
        return False
    alone = [of_rank for of_rank in matrices if of_rank[one].param.id not in reduced]
    return not any(_got_one_gradient(of_rank[one], of_rank[other]) for of_rank in alone)


def _got_one_gradient(mine: Track, theirs: Track) -> bool:
    """Whether the two ranks got the same gradients of one tensor, in all of their passes."""
    if not mine.leaves or mine.leaves.keys() != theirs.leaves.keys():
        return False
    pairs = [(mine.leaves[slot][1].data, theirs.leaves[slot][1].data) for slot in mine.leaves]
    return all(first.any() and np.allclose(first, second, rtol=ROUNDING, atol=0.0) for first, second in pairs)

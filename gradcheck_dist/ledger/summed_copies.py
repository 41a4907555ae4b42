"""Sums over ranks of what all of them hold alike already, of which backward hands on what arrives.

Each rank goes on with a multiple of its own, and the gradient is that of one of them. Shards that were drawn from one
seed make summands that are as alike. Before these stands a function that hands their input on and sums its gradient, so
that backward comes to it next; from a sum of copies it comes to what made them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from gradcheck_dist.events import Event, Exchange
from gradcheck_dist.ledger.exchange_parts import ALIKE, Parts
from gradcheck_dist.ledger.exchanges import SCATTER, SUM, passed, sides_of

SUMS = (("all_reduce",), ("reduce_scatter_tensor",), ("reduce_scatter",), ("reduce_scatter_single",))


def summed_copies(events: Mapping[int, list[Event]]) -> Iterator[dict[int, Exchange]]:
    """The exchanges that did so, by rank, in groups of ranks that sum unlike summands, too."""
    unlike = {one.ranks for one in passed(events) if one.forward in (SUM, SCATTER)}
    found: dict[tuple[object, ...], dict[int, Exchange]] = defaultdict(dict)
    for rank, of_rank in events.items():
        for event in of_rank:
            if isinstance(event, Exchange) and event.collectives == ("all_reduce",) and event.group in unlike:
                place = (event.group, event.accumulation_step, event.microbatch, event.index, event.function)
                found[place][rank] = event
    for of_group in found.values():
        first = next(iter(of_group.values()))
        whole = set(of_group) == set(first.group) and sum(first.input_counts) > 1
        if whole and _sums_copies(of_group) and all(_after_a_sum(events[rank], own) for rank, own in of_group.items()):
            yield of_group


def _after_a_sum(events: list[Event], own: Exchange) -> bool:
    """Whether backward comes to another sum of these ranks next. Of a function as many applications are recorded as
    come first, and none before it is known to communicate in backward: only where one that came later is there."""
    place = (own.group, own.accumulation_step, own.microbatch)
    beside = [
        event
        for event in events
        if isinstance(event, Exchange) and (event.group, event.accumulation_step, event.microbatch) == place
    ]
    following = next((event for event in beside if event.seq > own.seq), None)
    known = any(not event.collectives and event.seq < own.seq for event in beside)
    return known and following is not None and following.collectives in SUMS


def _sums_copies(of_group: dict[int, Exchange]) -> bool:
    read = {rank: sides_of(event) for rank, event in of_group.items()}
    if any(sides is None for sides in read.values()):
        return False
    given, made, arrived, back = (
        _stacked({rank: sides[side] for rank, sides in read.items() if sides}) for side in range(4)
    )
    if given is None or made is None or arrived is None or back is None or not given.shape == made.shape == back.shape:
        return False
    copies = _near(given, np.broadcast_to(given[0], given.shape)) and _near(made, len(given) * given)
    return copies and bool(made.any()) and _near(back, arrived)


def _near(mine: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.linalg.norm(mine - theirs) <= ALIKE * np.linalg.norm(theirs))


def _stacked(parts: Parts) -> np.ndarray | None:
    """What all ranks hold, shape (ranks, values); None where these are not as many on each."""
    whole = [np.concatenate(of_rank) for of_rank in parts.values()]
    return np.stack(whole) if len({len(one) for one in whole}) == 1 else None

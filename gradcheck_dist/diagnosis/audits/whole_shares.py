"""What an average over data ranks leaves of the gradient of one loss that each of them computes whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from gradcheck_dist.events import MAX_EXCHANGES, MAX_EXCHANGES_ALIKE, Exchange, Reduce
from gradcheck_dist.ledger.contributions import Contributions, losses_of_rank
from gradcheck_dist.ledger.exchanges import GATHER, SLICE, SUM, Passed
from gradcheck_dist.ledger.strangers import OTHER_LOSS, loss_values
from gradcheck_dist.ledger.tracks import Slot, StepData

UNDOES = 1e-3
"""Two factors whose product is nearer to 1 than this may be meant to undo one another."""


def share_of_whole(data: StepData, contributions: Contributions, one: Passed) -> float | None:
    """What an average over the ranks leaves of a loss's gradient that each of them computes whole on what all have put
    in, each from data of its own: of as many shares it takes the mean where their sum is due, and what backward summed
    makes up for that. None where ranks have losses of their own, or are one data rank. Of several losses one may be
    whole: what arrives is alike then on all ranks, which shares that a sum adds up would be, too.
    """
    if (
        one.forward not in (SUM, GATHER)
        or one.outcome not in ("right", "scaled", "kept")
        or sum(one.first.input_counts) < 2
    ):
        return None
    data_ranks = {contributions.coordinate.get(rank, rank) for rank in one.ranks}
    if len(data_ranks) < len(one.ranks) or (losses_differ(data, one) and not (one.whole and _averaged(data, one))):
        return None
    is_whole = has_values(data, one) if one.outcome == "kept" else one.whole
    return one.factor / len(one.ranks) if is_whole else None


def share_in_front(data: StepData, contributions: Contributions, one: Passed, found: Iterable[Passed]) -> float | None:
    """What an average leaves of that gradient in front of a function that gives each rank a part of what all hold
    alike, where they gather the parts again: backward makes one whole gradient of all parts on every rank, which
    an average does not change, of parts that have been multiplied behind it. 1 where that gather alone is wrong."""
    if one.forward != SLICE or one.outcome not in ("right", "scaled"):
        return None
    first = one.first
    behind = [
        other
        for other in found
        if (other.forward, other.ranks) == (GATHER, one.ranks)
        and (other.first.accumulation_step, other.first.microbatch) == (first.accumulation_step, first.microbatch)
        and other.first.index > first.index
    ]
    gather = min(behind, key=lambda other: other.first.index, default=None)
    share = None if gather is None else share_of_whole(data, contributions, gather)
    if share is None:
        return None
    whole = one.factor * len(one.ranks)
    return 1.0 if abs(whole - 1) <= UNDOES else whole * share


def losses_differ(data: StepData, one: Passed) -> bool:
    """Whether the ranks of an exchange have losses of their own and not one that each computes whole."""
    slot = (one.first.accumulation_step, one.first.microbatch)
    found = [loss_values(data, rank).get(slot, ()) for rank in one.ranks]
    return any(max(values) - min(values) > OTHER_LOSS * max(map(abs, values)) for values in zip(*found, strict=False))


def alone_before_one_loss(data: StepData, one: Passed) -> bool:
    """Whether each rank computes one loss whole on what an exchange gave, and shares no work behind it: what arrives is
    the gradient then, and no summand of it, though shards that were drawn from one seed make summands as alike.

    A cross-entropy of torch's has all classes on each rank; shards in front of it were combined by another exchange, to
    which backward comes first, or by DTensors, which are not looked at.
    """
    slot = (one.first.accumulation_step, one.first.microbatch)
    hashes = set()
    for rank, own in one.events.items():
        events = data.events[rank]
        pairs = losses_of_rank(events).get(slot, [])
        if len(pairs) != 1 or pairs[0][1] is None or pairs[0][1].op != "cross_entropy":
            return False
        hashes.add(pairs[0][1].label_hash)
        exchanges = [event for event in events if isinstance(event, Exchange)]
        if not _all_recorded(exchanges, slot) or any(
            _slot(event) == slot and event.seq < own.seq for event in exchanges
        ):
            return False
    parted = any(track.param.placements for of_rank in data.tracks.values() for track in of_rank.values())
    one_loss = None not in hashes and len(hashes) == 1 and has_values(data, one) and not losses_differ(data, one)
    return one_loss and not parted


def _all_recorded(exchanges: Sequence[Exchange], slot: Slot) -> bool:
    """Whether none of a pass's exchanges was left out: those that come first in a step are recorded."""
    later = {event.function for event in exchanges if _slot(event) > slot}
    counts = Counter(event.function for event in exchanges)
    return (len(exchanges) < MAX_EXCHANGES or bool(later)) and all(
        number < MAX_EXCHANGES_ALIKE or function in later for function, number in counts.items()
    )


def _slot(event: Exchange) -> Slot:
    return (event.accumulation_step, event.microbatch)


def has_values(data: StepData, one: Passed) -> bool:
    """Whether the values of the losses in an exchange's pass are known on all of its ranks."""
    slot = (one.first.accumulation_step, one.first.microbatch)
    return all(loss_values(data, rank).get(slot) for rank in one.ranks)


def _averaged(data: StepData, one: Passed) -> bool:
    """Whether every reduction of gradients over the ranks of an exchange is documented to average."""
    found = [
        event
        for rank in one.ranks
        for event in data.events[rank]
        if isinstance(event, Reduce) and set(one.ranks) <= {*event.group, *event.replicate_group}
    ]
    return bool(found) and all(event.op == "avg" and event.premul is None for event in found)

"""Losses that were evaluated in a step and never went backward: who counts tokens may count theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradcheck_dist.events import Event, Loss
from gradcheck_dist.ledger.contributions import Contributions, losses_of_rank


def left_aside(events: Mapping[int, Sequence[Event]], contributions: Contributions) -> int | None:
    """How many tokens of a step have a loss that asked for a gradient and got none, on all data ranks.

    Labels that other losses of the rank have as well count once, and not at all where one of these went backward.

    Returns:
        None where some such loss counts nothing that is known.
    """
    total = 0
    for ranks in contributions.ranks_of_coordinates():
        counts = [_of_rank(events.get(rank, ())) for rank in ranks]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        total += max(known, default=0)
    return total


def _of_rank(events: Sequence[Event]) -> int | None:
    went = [loss for pairs in losses_of_rank(list(events)).values() for _, loss in pairs if loss is not None]
    ids, labels = {loss.loss_id for loss in went}, {loss.label_hash for loss in went if loss.label_hash is not None}
    stayed = {
        loss.label_hash if loss.label_hash is not None else loss.loss_id: loss.num_tokens
        for loss in events
        if isinstance(loss, Loss) and loss.term == "main" and loss.requires_grad and loss.loss_id not in ids
        if loss.label_hash not in labels
    }
    counts = [count for count in stayed.values() if count is not None]
    return sum(counts) if len(counts) == len(stayed) else None

"""Ranks of one loss that pick its tokens' log-probabilities in their own shards of the vocabulary.

Each rank looks labels up in the classes that it holds, puts zeros in place of those that lie elsewhere, and a sum over
the ranks between these losses and the root puts all together. So labels differ between ranks, and each counts the
tokens that it found alone: they are one loss's, which counts all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradcheck_dist.events import Exchange, LossGradient
from gradcheck_dist.ledger.contributions import losses_of_rank
from gradcheck_dist.ledger.exchange_parts import flat
from gradcheck_dist.ledger.exchanges import SUM, Passed, passed, sides_of
from gradcheck_dist.ledger.repeated_batches import same_gradients
from gradcheck_dist.ledger.strangers import copies
from gradcheck_dist.ledger.tracks import StepData

FEWEST = 8
"""Elements that have to be one rank's alone, each of them."""


def picked_apart(data: StepData) -> set[tuple[int, ...]]:
    """The sets of ranks that evaluate one loss so."""
    found = [one for one in passed(data.events) if one.forward == SUM and one.outcome == "right" and one.whole]
    picked = {one.ranks for one in found if _are_picked(one) and all(_behind_losses(data, one))}
    return {ranks for ranks in picked if _could_be_one(data, ranks) and _compute_one(data, ranks)}


def _could_be_one(data: StepData, ranks: tuple[int, ...]) -> bool:
    """Whether labels are as many as one rank looked up, and not as many as all together: parts of a sequence."""
    by_rank = [losses_of_rank(data.events[rank]) for rank in ranks]
    for slot in by_rank[0]:
        pairs = [pair for of_rank in by_rank for pair in of_rank.get(slot, ())]
        labels = {loss.num_labels for _, loss in pairs if loss is not None}
        tokens = sum(gradient.num_tokens or 0 for gradient, _ in pairs)
        if len(labels) > 1 or any(most is None or tokens > most for most in labels):
            return False
    return True


def _compute_one(data: StepData, ranks: tuple[int, ...]) -> bool:
    """Whether a parameter is each rank's own, or all ranks get one gradient of it: neither is so of parts of a
    sequence."""
    first, *others = ranks
    held = [of_rank for of_rank in data.tracks.values() if {*ranks} <= of_rank.keys()]
    return any(
        not copies(of_rank, first, other) or same_gradients(of_rank[first], of_rank[other])
        for of_rank in held
        for other in others
    )


def _are_picked(one: Passed) -> bool:
    """Whether each element that is summed is one rank's, and all ranks have some."""
    sides = [sides_of(event) for event in one.events.values()]
    there = np.array([flat({0: parts[0]}) != 0 for parts in sides if parts is not None])
    if len(there) < len(sides) or not there.any(1).all() or there.any(0).sum() < FEWEST:
        return False
    return int(there.sum(0).max()) == 1


def _behind_losses(data: StepData, one: Passed) -> Iterator[bool]:
    """For each rank whether its losses' gradients came from there."""
    for rank, event in one.events.items():
        after = [loss.seq > event.seq for loss in data.events[rank] if isinstance(loss, LossGradient)
                 and _slot(loss) == _slot(event)]  # fmt: skip
        yield bool(after) and all(after)


def _slot(event: LossGradient | Exchange) -> tuple[int, int]:
    return event.accumulation_step, event.microbatch

"""Ranks that hold what look like copies of one parameter."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.tracks import StepData, Track


def are_joined(data: StepData, of_rank: Mapping[int, Track], group: tuple[int, ...]) -> bool:
    """Whether a reduction of a parameter's gradient goes over several of the ranks."""
    for rank in group:
        for event in data.events[rank]:
            if not isinstance(event, Reduce):
                continue
            joined = {*event.group, *event.replicate_group}
            if len(joined.intersection(group)) > 1 and of_rank[rank].param.id in data.params_of(rank, event.params):
                return True
    return False


def got_alike(of_rank: Mapping[int, Track], group: tuple[int, ...]) -> bool:
    """Whether the ranks hold equal values of a parameter and got equal gradients in backward."""
    first, *others = (of_rank[rank] for rank in group)
    for other in others:
        if first.begun is None or other.begun is None or not np.array_equal(first.begun, other.begun):
            return False
        if first.leaves.keys() != other.leaves.keys() or any(leaf.partial for _, leaf in first.leaves.values()):
            return False
        for slot, (_, mine) in first.leaves.items():
            if not np.allclose(mine.data, other.leaves[slot][1].data, rtol=1e-4, atol=0):
                return False
    return True

"""Ranks whose labels are alike and whose batches are not.

Labels tell which ranks evaluate the same tokens only as far as they tell batches apart. Those of a contrastive loss are
the same numbers in every batch (all zeros, or 0 to n-1), and so are those of small batches with few classes. Ranks that
share their tokens by design (tensor, sequence, expert parallelism) hold shards of something. Where all that two ranks
hold are copies, and most gradients that they compute in the same passes differ, each has a batch of its own, if their
losses differ as well or they reduce most such gradients together. What nobody trains counts, too: adapters may be
copies where what they adapt is parted. Shards that were drawn from one seed are no copies, but their ranks have one
loss, and reduce what they hold alike only: a norm under sequence parallelism, and no matrix. Ranks that part
the sequence alone hold copies, have one loss, and reduce all but what sees the whole of it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import numpy as np

from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.contributions import losses_of_rank
from gradcheck_dist.ledger.tracks import ParamKey, Slot, StepData, Track

UNLIKE = 0.1
"""Relative difference of two ranks' gradients from which they are no copies; kernels and low precision leave less."""
OTHER_LOSS = 1e-3
"""Relative difference of two losses from which they are not those of one batch; ranks of one model have equal bits."""
SAME_LOSS = 1e-5
"""Relative difference up to which two losses are one that both ranks computed."""


def strangers(data: StepData) -> dict[int, frozenset[int]]:
    """For each rank those, itself included, that have batches of their own whatever their labels say; only ranks that
    have any are named."""
    apart: dict[int, set[int]] = defaultdict(set)
    for one, other in combinations(sorted(data.events), 2):
        shared = [key for key, of_rank in data.tracks.items() if one in of_rank or other in of_rank]
        if any(_hold_parts(sets, one, other) for sets in data.frozen_parts) or not all(
            copies(data.tracks[key], one, other) for key in shared
        ):
            continue
        computed = [key for key in shared if any(data.tracks[key][rank].leaves for rank in (one, other))]
        unlike = [key for key in computed if _unlike(data.tracks[key], one, other)]
        alike = [key for key in computed if key not in unlike]
        together = _reduced(data, unlike, one, other) and not _one_loss(data, alike, one, other)
        if 2 * len(unlike) > len(computed) and (_losses_differ(data, one, other) or together):
            apart[one] |= {one, other}
            apart[other] |= {one, other}
    return {rank: frozenset(ranks) for rank, ranks in apart.items()}


def _hold_parts(sets: list[frozenset[int]], one: int, other: int) -> bool:
    """Whether the two ranks hold unlike tensors of one parameter."""
    return any((one in ranks) != (other in ranks) for ranks in sets) and {one, other} <= set().union(*sets)


def _unlike(of_rank: dict[int, Track], one: int, other: int) -> bool:
    """Whether the two ranks' gradients differ in a pass that both ran."""
    if one not in of_rank or other not in of_rank:
        return False
    mine, theirs = of_rank[one].leaves, of_rank[other].leaves
    for slot in mine.keys() & theirs.keys():
        first, second = mine[slot][1].data, theirs[slot][1].data
        scale = max(float(np.linalg.norm(first)), float(np.linalg.norm(second)))
        if np.isfinite(scale) and float(np.linalg.norm(first - second)) > UNLIKE * scale:
            return True
    return False


def copies(of_rank: dict[int, Track], one: int, other: int) -> bool:
    """Whether both ranks hold the whole of a parameter, with the same values."""
    if one not in of_rank or other not in of_rank:
        return False
    begun, theirs = of_rank[one].begun, of_rank[other].begun
    if begun is None or theirs is None or not np.array_equal(begun, theirs):
        return False
    leaves = [leaf for rank in (one, other) for _, leaf in of_rank[rank].leaves.values()]
    return not any(leaf.partial or np.isnan(leaf.data).any() for leaf in leaves)  # NaN: where a shard has no elements


def _losses_differ(data: StepData, one: int, other: int, allowed: float = OTHER_LOSS) -> bool:
    mine, theirs = loss_values(data, one), loss_values(data, other)
    return any(
        abs(first - second) > allowed * max(abs(first), abs(second))
        for slot in mine.keys() & theirs.keys()
        for first, second in zip(mine[slot], theirs[slot], strict=False)
    )


def loss_values(data: StepData, rank: int) -> dict[Slot, list[float]]:
    """The values of a rank's own losses, by (accumulation step, microbatch)."""
    return {
        slot: [loss.value for _, loss in pairs if loss is not None and loss.value is not None]
        for slot, pairs in losses_of_rank(data.events[rank]).items()
    }


def _one_loss(data: StepData, alike: list[ParamKey], one: int, other: int) -> bool:
    """Whether the two ranks have one loss, and what has one gradient on both is reduced by nothing: that is whole, and
    what they reduce are summands, of parts of one sequence."""
    known = any(loss_values(data, one).values()) and any(loss_values(data, other).values())
    same = known and not _losses_differ(data, one, other, SAME_LOSS)
    return same and bool(alike) and all(not _reduced(data, [key], one, other) for key in alike)


def _reduced(data: StepData, params: list[ParamKey], one: int, other: int) -> bool:
    """Whether reductions of most of these parameters join the two ranks."""
    reduced = {
        id
        for event in data.events[one]
        if isinstance(event, Reduce) and other in event.group
        for id in data.params_of(one, event.params)
    }
    return 2 * sum(data.tracks[key][one].param.id in reduced for key in params) > len(params)

"""Passes whose gradient is the same on all ranks, though these have batches of their own: a penalty on parameters.

How much of each rank's came into a gradient cannot be told, only how much of all of them: without a reduction each rank
has it as it would with their average. So their weights are shared out evenly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.leaves import Basis
from gradcheck_dist.ledger.tracks import Slot


def share_out(measured: Sequence[Held], contributions: Contributions) -> None:
    """Give all ranks' columns of such a pass the same weight. A pass with labels has a batch; and where every pass is
    the same on all ranks, they read one batch."""
    ranks = {key[0] for key in contributions.by_key}
    labelled = {key[1:] for key, one in contributions.by_key.items() if one.num_tokens is not None or one.label_hash}
    told = {slot for key in contributions.by_key if (slot := key[1:]) not in labelled}
    bases = {id(held.replay.basis): held.replay.basis for held in measured}  # one for all ranks of a parameter
    columns = {known_as: _columns(basis) for known_as, basis in bases.items()}
    unlike = {
        slot
        for known_as, basis in bases.items()
        for slot, indices in columns[known_as].items()
        if not _are_same(basis, indices, ranks)
    }
    if len(ranks) < 2 or not unlike:
        return
    for held in measured:
        if held.observed is None:
            continue
        of_held = columns[id(held.replay.basis)]
        held.observed = held.observed.copy()
        for slot in told & of_held.keys() - unlike:
            held.observed[of_held[slot]] = np.mean(held.observed[of_held[slot]])


def _columns(basis: Basis) -> dict[Slot, list[int]]:
    found: dict[Slot, list[int]] = defaultdict(list)
    for index, slot in enumerate(basis.slots):
        found[slot].append(index)
    return found


def _are_same(basis: Basis, columns: Sequence[int], ranks: set[int]) -> bool:
    """Whether each of the ranks has one column, and all are equal, bit by bit."""
    first, *others = (basis.values[column] for column in columns)
    one_each = len(columns) == len(ranks) and {basis.keys[column][0] for column in columns} == ranks
    return one_each and all(np.array_equal(first, other) for other in others)

"""Ranks that each compute the whole of one model's gradient on the same tokens, and add these gradients up.

Labels alike make ranks one data coordinate: tensor, sequence and expert parallelism share tokens by design. Ranks that
do so divide the work. Where all that two ranks hold are copies, their losses and gradients are the same in every pass,
nothing is exchanged among them in forward or backward, and all of it is reduced over both, they repeat one another.
So do ranks whose losses have no labels, where inputs and targets are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

import numpy as np

from gradcheck_dist.events import SHARDING, Backward, Exchange, Reduce
from gradcheck_dist.ledger.contributions import Contribution, Contributions, losses_of_rank
from gradcheck_dist.ledger.strangers import copies, loss_values
from gradcheck_dist.ledger.tracks import StepData, Track
from gradcheck_dist.wording import numbered

SAME = 1e-3
"""Relative difference of gradients of one batch on two ranks: with the same numbers they are equal bits."""


def repeating(data: StepData, contributions: Contributions) -> list[tuple[int, ...]]:
    """The sets of ranks that repeat one another's batches though labels make them one data coordinate."""
    if contributions.coordinate_from == "declared":
        return []
    together: dict[object, list[int]] = defaultdict(list)
    for rank, coordinate in contributions.coordinate.items():
        if any(loss_values(data, rank).values()):
            together[coordinate].append(rank)
        elif batches := batches_given(data, rank):
            together[batches].append(rank)
    found = []
    for ranks in together.values():
        first, *others = sorted(ranks)
        alike = [rank for rank in others if _repeats(data, first, rank)]
        if alike:
            found.append((first, *alike))
    return found


def told_repeated(data: StepData, contributions: Contributions) -> list[str]:
    """Data ranks whose accumulation steps all train on one batch, in words: a loader that is begun anew for each, or a
    batch that is fetched in front of their loop. Dropout makes passes over one batch unlike, and they are not told."""
    events = (event for of_rank in data.events.values() for event in of_rank)
    if any(isinstance(event, Backward) and event.first_of_forward is not None for event in events):
        return []  # one forward pass is differentiated again, which is told elsewhere
    passes: dict[int, dict[int, Contribution]] = defaultdict(dict)
    for (place, step, _), one in contributions.by_key.items():
        if step in passes[place] or not one.label_hash or not one.value or one.loss_rank is None:
            return []
        passes[place][step] = one
    told: dict[int, list[int]] = defaultdict(list)  # data ranks, by how many steps theirs are
    for place, of_place in sorted(passes.items()):
        first, *others = of_place.values()
        alike = (first.label_hash, first.num_tokens, first.value)
        if others and all((one.label_hash, one.num_tokens, one.value) == alike for one in others):
            leaves = [
                [track.leaves[one.key[1:]][1].data for one in of_place.values() if one.key[1:] in track.leaves]
                for of_rank in data.tracks.values()
                if (track := of_rank.get(first.loss_rank or 0)) is not None
            ]
            if any(leaves) and all(_same(part, parts[0]) for parts in leaves for part in parts):
                told[len(of_place)].append(place)
    return [
        f"the {num} accumulation steps of {numbered('data rank', places)} train on one batch (labels, losses and "
        "gradients are the same): fetch a batch in each, from one iterator, unless that is meant"
        for num, places in told.items()
    ]


def _same(mine: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.array_equal(mine, theirs, equal_nan=True))


def batches_given(data: StepData, rank: int) -> tuple[object, ...]:
    """What a rank's passes were given whose losses have no labels: the pass, and checksums of inputs and targets. Empty
    where that is not known of all of them."""
    pairs = [(slot, loss) for slot, found in losses_of_rank(data.events[rank]).items() for _, loss in found]
    if any(loss is None or loss.inputs_hash is None or loss.targets_hash is None for _, loss in pairs):
        return ()
    return tuple(sorted((*slot, loss.inputs_hash, loss.targets_hash) for slot, loss in pairs if loss is not None))


def _repeats(data: StepData, one: int, other: int) -> bool:
    held = [of_rank for of_rank in data.tracks.values() if one in of_rank or other in of_rank]
    trained = [of_rank for of_rank in held if any(of_rank[rank].leaves for rank in (one, other) if rank in of_rank)]
    if not trained or loss_values(data, one) != loss_values(data, other) or exchange(data, one, other):
        return False
    reduced, sharded = reduced_over(data, one, other), reduced_over(data, one, other, SHARDING)
    return all(
        (copies(of_rank, one, other) or of_rank[one].param.id in sharded)
        and same_gradients(of_rank[one], of_rank[other])
        and of_rank[one].param.id in reduced
        for of_rank in trained
    )


def same_gradients(mine: Track, theirs: Track) -> bool:
    """Whether gradients are the same in every pass, and some are not zero."""
    if mine.leaves.keys() != theirs.leaves.keys():
        return False
    sizes = 0.0
    for slot, (_, leaf) in mine.leaves.items():
        size = float(np.linalg.norm(leaf.data))
        if not float(np.linalg.norm(leaf.data - theirs.leaves[slot][1].data)) <= SAME * size:
            return False
        sizes += size
    return sizes > 0


def exchange(data: StepData, one: int, other: int) -> bool:
    """Whether activations go from one of the ranks to the other."""
    events = (event for rank in (one, other) for event in data.events[rank])
    return any(isinstance(event, Exchange) and {one, other} <= set(event.group) for event in events)


def reduced_over(data: StepData, one: int, other: int, impls: Container[str] | None = None) -> set[int]:
    """The parameters whose gradients are reduced over both, by these wrappers where they are given."""
    return {
        param
        for event in data.events[one]
        if isinstance(event, Reduce) and {one, other} <= {*event.group, *event.replicate_group}
        if impls is None or event.impl in impls
        for param in data.params_of(one, event.params)
    }

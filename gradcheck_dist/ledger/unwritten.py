"""Reductions by hand whose result is in no gradient: of a copy that was never written back, or not waited for.

The gradient that is read behind such a reduction is, bit by bit, what was there before it. It is taken out of the way
of the weights, which then lack a reduction, and kept beside them, as its line is where something is missing. Where all
ranks brought the same numbers, their mean is that of each, and nothing tells that it went elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gradcheck_dist.events import AFTER, BEFORE, DATA_PARALLEL, SHARDING, Reduce
from gradcheck_dist.ledger.tracks import StepData, Track


def without_unwritten(data: StepData) -> StepData:
    """The same step with these reductions marked, where that is true on all ranks of their group."""
    found = {}
    for key, of_rank in data.tracks.items():
        left = {rank: event for rank, track in of_rank.items() if (event := _unwritten(data, track)) is not None}
        if left and all(
            set(event.group) <= set(left) and _differ(event.group, left, of_rank) for event in left.values()
        ):
            found[key] = {rank: replace(track, unwritten=left.get(rank)) for rank, track in of_rank.items()}
    return replace(data, tracks=data.tracks | found) if found else data


def _differ(group: tuple[int, ...], reductions: Mapping[int, Reduce], of_rank: Mapping[int, Track]) -> bool:
    """Whether the ranks of a reduction did not all bring the same numbers, as far as that was seen."""
    first, *others = (_brought(reductions[rank], of_rank[rank]) for rank in group)
    return first is None or any(one is None or not np.array_equal(one, first, equal_nan=True) for one in others)


def _brought(reduction: Reduce, track: Track) -> np.ndarray | None:
    seen = [one for one in track.points if (one.seq, one.role) == (reduction.seq, BEFORE) or one.seq < reduction.seq]
    return seen[-1].values.data if seen else None


def _unwritten(data: StepData, track: Track) -> Reduce | None:
    """The last reduction of a parameter's gradient on a rank, where the next sample shows the gradient as it was."""
    last = next(
        (
            event
            for event in reversed(data.events[track.rank])
            if isinstance(event, Reduce) and track.param.id in data.params_of(track.rank, event.params)
        ),
        None,
    )
    if last is None or last.impl in DATA_PARALLEL | SHARDING or last.root is not None or len(last.group) < 2:
        return None
    after = next((one.values.data for one in track.points if (one.seq, one.role) == (last.seq, AFTER)), None)
    read = next((one.values.data for one in track.points if one.seq > last.seq), None)
    if read is None or any(seq > last.seq for seq, _ in track.leaves.values()):
        return None
    taken = [one.values.data for one in track.points if (one.seq, one.role) == (last.seq, BEFORE)]
    earlier = [one.values.data for one in track.points if one.seq < last.seq][-1:]
    unchanged = any(np.array_equal(read, one, equal_nan=True) for one in [*taken, *earlier])
    came = after is not None and np.array_equal(read, after, equal_nan=True)
    return last if unchanged and not came and np.nan_to_num(read).any() else None

"""Gradients that are reduced while their pass still goes on.

Autograd hands a parameter's gradient on in parts where a backward pass runs inside of another (checkpointed regions of
a module that is used twice). A hook that reduces behind the first part leaves the others on their own rank, and one
that is called for each part reduces the first again with them.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gradcheck_dist.events import AFTER, BEFORE, Reduce
from gradcheck_dist.ledger.tracks import StepData, Track

COMES_EARLY = "comes while backward still adds to it: what is added after that stays on its own rank"
COMES_AGAIN = "comes while backward still adds to it, and again behind that: what was there at first is reduced twice"
NEAR = 1e-4
"""Relative difference within which two float32 gradients are one."""
A_PART = 1e-2
"""Share of a pass's gradient from which something is more than rounding."""


def reduced_early(data: StepData, track: Track) -> Reduce | None:
    """The reduction behind which a part of its own pass's gradient was added, bit for bit what was lacking before it;
    None where there is none."""
    points = sorted(track.points, key=lambda point: (point.seq, point.role))
    for place, (before, after) in enumerate(pairwise(points)):
        event = data.event_of[track.rank].get(before.seq)
        if (before.role, after.role, after.seq) != (BEFORE, AFTER, before.seq) or not isinstance(event, Reduce):
            continue
        arrived = track.leaves.get((event.accumulation_step, event.microbatch))
        if arrived is None or place + 2 >= len(points) or arrived[0] > event.seq:
            continue
        earlier = [point for point in points[:place] if point.seq < arrived[0]]
        whole = arrived[1].data + (earlier[-1].values.data if earlier else 0.0)
        lacking = whole - before.values.data
        added = points[place + 2].values.data - after.values.data
        size = float(np.linalg.norm(arrived[1].data))
        if A_PART * size < np.linalg.norm(lacking) and np.linalg.norm(added - lacking) <= NEAR * size:
            return event
    return None


def early_in_words(data: StepData, track: Track, early: Reduce) -> str:
    """What such a reduction leaves, by whether another one of the same pass follows."""
    place = early.accumulation_step, early.microbatch
    behind = [event for event in data.events[track.rank] if isinstance(event, Reduce) and event.seq > early.seq]
    again = any(
        (event.accumulation_step, event.microbatch) == place
        and track.param.id in data.params_of(track.rank, event.params)
        for event in behind
    )
    return COMES_AGAIN if again else COMES_EARLY

"""Parameters that their owner updates by hand and hands to the other ranks, which read no gradient of them.

Of an optimizer of the program's own nothing tells which gradients it read: those of all parameters that hold other
values, unless the parameter itself is broadcast (probes/optimizers/own_optimizer.py). Where it comes in a flat copy, by
a gather or as an object, its value tells: a gradient that was reduced to its owner alone differs on the others, who
hold the owner's value all the same when the step is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from gradcheck_dist.events import BEFORE, OWN_OPTIMIZER, Event, OptimizerStep, Reduce, Replica
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track


def without_sent(data: StepData) -> StepData:
    """The same step, in which such gradients are read on their owners alone.

    Whether values are alike is known of some parameters only, behind a model's first step. So most of those that ranks
    seem to have stepped have to be sent to some of them.
    """
    if not any(_is_rooted(event) for events in data.events.values() for event in events):
        return data
    lefts = {rank: _left(events) for rank, events in data.events.items()}
    sent: dict[tuple[int, int], dict[ParamKey, Track]] = defaultdict(dict)
    for key, of_rank in data.tracks.items():
        for track, step in _sent(data, of_rank, lefts):
            sent[track.rank, step.seq][key] = track
    steps = {
        (rank, event.seq): event
        for rank, events in data.events.items()
        for event in events
        if isinstance(event, OptimizerStep) and (rank, event.seq) in sent
    }
    stepped = {
        key
        for (rank, _), step in steps.items()
        for key, of_rank in data.tracks.items()
        if rank in of_rank and of_rank[rank].param.id in data.params_of(rank, step.params)
    }
    if not sent or 2 * len({key for of_step in sent.values() for key in of_step}) < len(stepped):
        return data
    tracks, sets = dict(data.tracks), {rank: dict(known) for rank, known in data.param_sets.items()}
    made: dict[tuple[int, int], int] = {}
    for at in sorted(sent):
        rank, seq = at
        gone = {track.param.id for track in sent[at].values()}
        number = made[at] = max(sets[rank], default=0) + 1
        sets[rank][number] = tuple(one for one in data.params_of(rank, steps[at].params) if one not in gone)
        for key, track in sent[at].items():
            left = [point for point in track.points if (point.seq, point.role) != (seq, BEFORE)]
            tracks[key] = tracks[key] | {rank: replace(track, points=left)}

    def read(rank: int, event: Event) -> Event:
        number = made.get((rank, event.seq)) if isinstance(event, OptimizerStep) else None
        return event if number is None else msgspec.structs.replace(event, params=number)

    events = {rank: [read(rank, one) for one in of_rank] for rank, of_rank in data.events.items()}
    return replace(data, events=events, tracks=tracks, param_sets=sets)


def _is_rooted(event: Event) -> bool:
    return isinstance(event, Reduce) and event.root is not None


def _left(events: list[Event]) -> int | None:
    """The checksum of a rank's parameters when the step was over; None where nobody looked."""
    return next((one.fingerprint for one in reversed(events) if isinstance(one, Replica) and one.after), None)


def _sent(
    data: StepData, of_rank: dict[int, Track], lefts: dict[int, int | None]
) -> Iterator[tuple[Track, OptimizerStep]]:
    """The ranks which seem to have stepped a parameter whose gradient went to another one, by what they seem to have
    read, and hold what that one holds."""
    for rank, track in of_rank.items():
        mine = [
            event
            for event in data.events[rank]
            if isinstance(event, Reduce | OptimizerStep) and track.param.id in data.params_of(rank, event.params)
        ]
        last, step = mine[-2:] if len(mine) > 1 else (None, None)
        if not isinstance(last, Reduce) or last.root in (None, rank) or not isinstance(step, OptimizerStep):
            continue
        owner = of_rank.get(last.root) if last.root is not None else None
        if owner is None or step.optimizer != OWN_OPTIMIZER or lefts[rank] is None or lefts[rank] != lefts[owner.rank]:
            continue
        begun = None not in (track.left, owner.left)
        if begun and not np.array_equal(track.left, owner.left, equal_nan=True):  # type: ignore[arg-type]
            continue
        own, theirs = _read(track), _read(owner)
        if own is not None and theirs is not None and not np.array_equal(own, theirs, equal_nan=True):
            yield track, step


def _read(track: Track) -> np.ndarray | None:
    """What was last seen of a gradient: an optimizer reads it."""
    last = track.points[-1] if track.points else None
    return last.values.data if last is not None and last.role == BEFORE else None

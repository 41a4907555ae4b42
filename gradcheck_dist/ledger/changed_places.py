"""Gradients that changed places: each of some parameters has what another one of them had, bit by bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gradcheck_dist.events import Event
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track

LEAST = 4
"""Elements that are not zero: fewer may be equal by chance, or by a symmetry of the model."""


@dataclass(frozen=True)
class ChangedPlaces:
    """Whose gradient each parameter of a rank has at `event`, and had not at the event `before`, which may be the same
    backward pass."""

    rank: int
    before: Event | None
    event: Event
    has: Mapping[ParamKey, ParamKey]


def changed_places(data: StepData) -> Iterator[ChangedPlaces]:
    """Sampled positions go by shape, so that gradients of equal shape can be compared. Only what changes places among
    themselves is told: a gradient that is copied to another model's parameters is meant there."""
    for rank in sorted(data.events):
        looked_at: dict[int, dict[ParamKey, tuple[int, bytes, bytes]]] = defaultdict(dict)
        for key, of_rank in data.tracks.items():
            for seq, was in _samples(of_rank.get(rank)):
                looked_at[seq].setdefault(key, was)
        for seq, of_key in sorted(looked_at.items()):
            if (has := _among_themselves(of_key)) and (event := data.event_of[rank].get(seq)) is not None:
                last = max(of_key[key][0] for key in has)
                yield ChangedPlaces(rank, data.event_of[rank].get(last), event, has)


def _samples(track: Track | None) -> Iterator[tuple[int, tuple[int, bytes, bytes]]]:
    """By the number of each event at which a parameter's gradient was sampled: the number of the sample before, and
    both. In front of the first stands what the first pass alone brought."""
    if track is None or not track.points:
        return
    brought = [leaf for leaf in track.leaves.values() if leaf[0] <= track.points[0].seq]
    # What torch.autograd.grad returns is in .grad when the next pass is over.
    brought = [leaf for leaf in brought if leaf[0] < track.points[0].seq] or brought
    samples = [(seq, leaf.data) for seq, leaf in brought[:1] if len(brought) == 1]
    for earlier, later in pairwise([*samples, *((point.seq, point.values.data) for point in track.points)]):
        if np.count_nonzero(np.nan_to_num(later[1])) >= LEAST:
            yield later[0], (earlier[0], earlier[1].tobytes(), later[1].tobytes())


def _among_themselves(of_key: Mapping[ParamKey, tuple[int, bytes, bytes]]) -> dict[ParamKey, ParamKey]:
    owners: dict[bytes, list[ParamKey]] = defaultdict(list)
    for key, (_, before, _) in of_key.items():
        owners[before].append(key)
    has = {
        key: owners[now][0]
        for key, (_, before, now) in of_key.items()
        if now != before and len(owners.get(now, ())) == 1 and owners[now] != [key]
    }
    while astray := [key for key, owner in has.items() if owner not in has]:
        for key in astray:
            del has[key]
    return has

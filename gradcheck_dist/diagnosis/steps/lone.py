"""Parameters that some data ranks train beside all that the others do, and that nobody reduces over both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track
from gradcheck_dist.wording import numbered

ALONE = "right for what is meant to be"
"""Stands in what is said of such parameters."""


def trained_alone(data: StepData, coordinate: Mapping[int, int]) -> list[str]:
    """What data ranks train that are reduced with others in all that these train, and train more.

    A module that was built on some of them only is a head of their own, or a copy that was lost to the others: a matrix
    that came untied there. One that all have, and some did not use in this step, stays behind on these. An expert is
    known by the exchange in front of it.
    """
    trains = {rank: {key for key, of in data.tracks.items() if rank in of and of[rank].leaves} for rank in data.events}
    if len({len(keys) for keys in trains.values()}) < 2:
        return []
    with_whom = {rank: _reduced_with(data, rank) for rank in data.events}
    more: dict[tuple[tuple[int, ...], tuple[int, ...], bool], list[ParamKey]] = defaultdict(list)
    for key, of_rank in data.tracks.items():
        holders = [rank for rank, track in of_rank.items() if track.leaves]
        if any(track.exchanges is not None for track in of_rank.values()):
            continue
        own = {rank for holder in holders for rank in with_whom[holder].get(of_rank[holder].param.id, ())}
        every = {rank for holder in holders for of_param in with_whom[holder].values() for rank in of_param}
        without = {rank for rank in every - own if key not in trains.get(rank, {key})}
        unused = without & set(of_rank)
        if not without or (unused and (unused != without or not _copies(of_rank))):
            continue
        if all(trains[rank] < trains[holder] and coordinate.get(rank, rank) != coordinate.get(holder, holder)
               for rank in without for holder in holders):  # fmt: skip
            more[tuple(sorted(holders)), tuple(sorted(without)), bool(unused)].append(key)
    return [_words(data, keys, *where) for where, keys in more.items()]


def _reduced_with(data: StepData, rank: int) -> dict[int, set[int]]:
    """The ranks with which a rank reduces each of its parameters."""
    found: dict[int, set[int]] = defaultdict(set)
    for event in data.events[rank]:
        if isinstance(event, Reduce) and len(event.group) > 1:
            for param in data.params_of(rank, event.params):
                found[param].update(event.group)
    return found


def _copies(of_rank: Mapping[int, Track]) -> bool:
    """Whether ranks began with one value."""
    first, *others = (track.begun for track in of_rank.values())
    return first is not None and all(one is not None and np.array_equal(one, first) for one in others)


def _words(
    data: StepData, keys: list[ParamKey], holders: tuple[int, ...], without: tuple[int, ...], unused: bool
) -> str:
    names = in_short(sorted(key[1] for key in keys))
    verb = "is" if len(keys) == 1 else "are"
    if unused:
        return (
            f"{names} {verb} trained on {numbered('rank', holders)} alone and reduced over no others: copies on "
            f"{numbered('rank', without)}, which had no gradient of it in this step, stay behind ({ALONE} "
            "each rank's own; else reduce it on all of them, zeros where there is none)"
        )
    began = sorted({name for key in keys for name in _alike(data, key, holders[0])})
    origin = f", and began with the values of {in_short(began)}" if began else ""
    return (
        f"{names} {verb} on {numbered('rank', holders)} alone{origin}; nothing of that name is on "
        f"{numbered('rank', without)}, where all that there is is reduced with these: {ALONE} these ranks' own, wrong "
        "for a copy that the others lost (a matrix that is tied there, and no more here)"
    )


def _alike(data: StepData, key: ParamKey, rank: int) -> Iterator[str]:
    """The parameters of a rank that hold the same values."""
    mine = data.tracks[key][rank]
    for other, of_rank in data.tracks.items():
        if other != key and rank in of_rank and _same(mine, of_rank[rank]):
            yield other[1]


def _same(mine: Track, theirs: Track) -> bool:
    if mine.begun is None or theirs.begun is None or mine.param.shape != theirs.param.shape:
        return False
    return bool(np.ptp(mine.begun) > 0 and np.array_equal(mine.begun, theirs.begun))

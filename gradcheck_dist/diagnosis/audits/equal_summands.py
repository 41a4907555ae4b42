"""Parameters that tensor-parallel ranks each add to a summand of what they sum: their gradient is a sum of equal parts.

Such parts look like copies of the whole gradient. Where nobody sums them, no weight is wrong and the audit tells; where
somebody does, each rank's weighs as one of so many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.ledger.exchanges import COPY, SCATTER, SUM, Passed, passed
from gradcheck_dist.ledger.like_copies import are_joined, got_alike
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track

LEAST = 1e-3
"""Relative: how near to a whole number of times a gradient has to be."""


@dataclass(frozen=True)
class EqualSummands:
    """Parameters that each rank adds to its summand of `sum` alike, so that their gradient is the sum of equal parts,
    and that nothing adds up."""

    sum: Passed
    params: frozenset[ParamKey]


def equal_summands(data: StepData, held: Iterable[Held]) -> list[EqualSummands]:
    """Those that nothing adds up, as far as is known of what ranks hold."""
    summed = {one.param for one in held if one.parts > 1}
    found: dict[object, tuple[Passed, set[ParamKey]]] = {}
    for one, keys, tracks in _added_alike(data):
        if summed.isdisjoint(keys) and not are_joined(data, tracks, one.ranks) and _have_one_gradient(tracks):
            site = one.first.site
            found.setdefault((site.file, site.line) if site else None, (one, set()))[1].update(keys)
    return [EqualSummands(one, frozenset(params)) for one, params in found.values()]


def in_parts(measured: list[Held], data: StepData, coordinate: Mapping[int, int]) -> list[Held]:
    """The same, with the number of equal parts where ranks of one batch (`coordinate`: the data coordinate of each)
    add these up: by a reduction over them, or by what nobody recorded and multiplies each by just this number (a hook
    that all-reduces)."""
    parts: dict[ParamKey, int] = {}
    for one, keys, tracks in _added_alike(data):
        num = len(one.ranks)
        if len({coordinate.get(rank, -1 - rank) for rank in one.ranks}) > 1:
            continue
        if are_joined(data, tracks, one.ranks) or _multiplied([held for held in measured if held.param in keys], num):
            parts |= dict.fromkeys(keys, num)
    return [replace(held, parts=parts.get(held.param, 1)) for held in measured] if parts else measured


def _multiplied(measured: Sequence[Held], num: int) -> bool:
    """Whether each rank's gradient was measured to be so many times what the records say."""
    known = [held for held in measured if held.observed is not None and held.nominal is not None]
    return bool(known) and all(
        held.nominal.any() and np.allclose(held.observed, num * held.nominal, rtol=LEAST, atol=LEAST * num)
        for held in known
        if held.observed is not None and held.nominal is not None
    )


def _added_alike(data: StepData) -> Iterator[tuple[Passed, set[ParamKey], dict[int, Track]]]:
    """Copies of a parameter behind which ranks sum what they made of it: a bias that each tensor-parallel rank adds
    before the all-reduce. Where the ranks' gradients of it differ, the weights tell."""
    exchanges = list(passed(data.events))
    if not any(one.forward in (SUM, SCATTER) for one in exchanges):
        return
    named: dict[tuple[int, str], list[tuple[ParamKey, Track]]] = defaultdict(list)
    for key, of_key in data.tracks.items():
        for rank, track in of_key.items():
            # Biases that began as zeros have names of their own where their module's weights are shards.
            named[rank, key[1].split(" ")[0]].append((key, track))
    for one in exchanges:
        if one.forward not in (SUM, SCATTER):
            continue
        names = [
            # What is added to a parameter may make its share of the sum that of one rank, and its gradient is whole.
            _names(data, named, rank, event.params) - _names(data, named, rank, event.shifted)
            for rank, event in one.events.items()
        ]
        # What backward sums over the ranks on another way is alike on all of them, and whole.
        summed = [other for other in exchanges if other.forward == COPY and other.ranks == one.ranks]
        elsewhere = {name for other in summed for rank, event in other.events.items()
                     for name in _names(data, named, rank, event.params)}  # fmt: skip
        for name in set.intersection(*names) - elsewhere:
            tracks = {rank: track for rank in one.ranks for _, track in named[rank, name]}
            if got_alike(tracks, one.ranks):
                yield one, {key for rank in one.ranks for key, _ in named[rank, name]}, tracks


def _names(
    data: StepData, named: Mapping[tuple[int, str], list[tuple[ParamKey, Track]]], rank: int, params: int | None
) -> set[str]:
    """The names of a set of parameters on a rank, as far as they are one parameter's alone."""
    ids = set(data.params_of(rank, params))
    return {
        name
        for (holder, name), tracks in named.items()
        if holder == rank and len(tracks) == 1 and tracks[0][1].param.id in ids
    }


def _have_one_gradient(tracks: Mapping[int, Track]) -> bool:
    """Whether behind the step it is the same on all ranks, as one of them got it."""
    first, *others = (track.left for track in tracks.values())
    gradients = [leaf.data for _, leaf in next(iter(tracks.values())).leaves.values()]
    return any(np.nan_to_num(one).any() for one in gradients) and all(
        one is not None and first is not None and np.allclose(one, first, rtol=1e-5, atol=0) for one in (first, *others)
    )

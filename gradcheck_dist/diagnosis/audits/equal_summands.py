"""Parameters that tensor-parallel ranks each add to a summand of what they sum, and whose gradient nobody sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gradcheck_dist.diagnosis.audits.verified import alike_and_apart
from gradcheck_dist.ledger.exchanges import COPY, SCATTER, SUM, Passed, passed
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track


@dataclass(frozen=True)
class EqualSummands:
    """Parameters that each rank adds to its summand of `sum` alike, so that their gradient is the sum of equal parts,
    and that nothing adds up."""

    sum: Passed
    params: frozenset[ParamKey]


def equal_summands(data: StepData) -> list[EqualSummands]:
    """Copies of a parameter behind which ranks sum what they made of it: a bias that each tensor-parallel rank adds
    before the all-reduce. Where the ranks' gradients of it differ, the weights tell."""
    named: dict[tuple[int, str], list[tuple[ParamKey, Track]]] = defaultdict(list)
    for key, of_key in data.tracks.items():
        for rank, track in of_key.items():
            # Biases that began as zeros have names of their own where their module's weights are shards.
            named[rank, key[1].split(" ")[0]].append((key, track))
    found: dict[object, tuple[Passed, set[ParamKey]]] = {}
    exchanges = list(passed(data.events))
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
        site = one.first.site
        for name in set.intersection(*names) - elsewhere:
            tracks = {rank: track for rank in one.ranks for _, track in named[rank, name]}
            if _are_copies(data, tracks, one.ranks):
                keys = {key for rank in one.ranks for key, _ in named[rank, name]}
                found.setdefault((site.file, site.line) if site else None, (one, set()))[1].update(keys)
    return [EqualSummands(one, frozenset(params)) for one, params in found.values()]


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


def _are_copies(data: StepData, tracks: Mapping[int, Track], ranks: tuple[int, ...]) -> bool:
    """Whether ranks hold copies of a parameter, in front of the step and behind it, with one gradient."""
    if not alike_and_apart(data, tracks, ranks):
        return False
    left = [tracks[rank].left for rank in ranks]
    gradients = [leaf.data for _, leaf in tracks[ranks[0]].leaves.values()]
    return any(np.nan_to_num(one).any() for one in gradients) and all(
        one is not None and left[0] is not None and np.allclose(one, left[0], rtol=1e-5, atol=0) for one in left
    )

"""The basis in which gradients are expressed: one column a contribution, out of the leaves of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from gradcheck_dist.ledger.contributions import (
    SAME_DATA_SETTING,
    ContributionKey,
    Contributions,
    data_parallel_peers,
    may_share,
)
from gradcheck_dist.ledger.one_loss import with_one_loss
from gradcheck_dist.ledger.tracks import Slot, StepData, Track

SAME = 1e-2
"""Two ranks' leaves are copies of one another when they differ by less than this, relative to their norm: sums in any
order and low precision leave less, and summands are further apart."""


@dataclass
class Basis:
    """Columns of one parameter. Several ranks may hold leaves of one contribution (tensor parallel):

    copies share a column, shards fill one, unequal full leaves (partial sums) keep a column each.
    `keys[j]` is the contribution of column j, `origin[j]` a rank on which it arrived, `of[rank, slot]` its columns'
    index. `values` has shape (num_columns, num_positions), NaN where no rank sampled.
    """

    keys: list[ContributionKey]
    origin: list[int]
    of: dict[tuple[int, int, int], int]
    values: np.ndarray
    summands: dict[ContributionKey, int]

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def slots(self) -> list[Slot]:
        """The pass of each column, one for the same pass of all ranks."""
        return [key[1:] for key in self.keys]

    @cached_property
    def passes(self) -> np.ndarray:
        """The number of each column's pass, shape (num_columns,)."""
        numbers: dict[Slot, int] = {}
        return np.array([numbers.setdefault(slot, len(numbers)) for slot in self.slots], dtype=int)

    @cached_property
    def of_contribution(self) -> dict[ContributionKey, list[int]]:
        """The columns of each contribution."""
        found: dict[ContributionKey, list[int]] = {}
        for column, key in enumerate(self.keys):
            found.setdefault(key, []).append(column)
        return found

    @cached_property
    def empty(self) -> frozenset[int]:
        """Summands that are all zeros beside others of the same contribution that are not: a part of the sequence
        without labels. In a sum they are there whether or not somebody added them."""
        if all(number < 2 for number in self.summands.values()):
            return frozenset()
        zero = ~np.nan_to_num(self.values).any(axis=1)
        there = {key for key, empty in zip(self.keys, zero, strict=True) if not empty}
        return frozenset(
            column for column, key in enumerate(self.keys) if zero[column] and key in there and self.summands[key] > 1
        )

    @cached_property
    def ranks_of(self) -> dict[int, list[int]]:
        """The ranks on which each column's gradient arrived. Asked for when the basis is built."""
        found: dict[int, list[int]] = {}
        for (rank, *_), column in self.of.items():
            found.setdefault(column, []).append(rank)
        return found


def build_basis(
    tracks: dict[int, Track], contributions: Contributions, beside: Mapping[int, Track] | None = None
) -> Basis:
    """The columns of one parameter from its tracks on all ranks, and from those of a tied copy `beside` it."""
    keys: list[ContributionKey] = []
    origin: list[int] = []
    of: dict[tuple[int, int, int], int] = {}
    values: list[np.ndarray] = []
    columns_of: dict[ContributionKey, list[int]] = {}
    copies = [(-1 - rank, rank, track) for rank, track in sorted((beside or {}).items())]
    for own, rank, track in [*((rank, rank, track) for rank, track in sorted(tracks.items())), *copies]:
        for slot, (_, leaf) in sorted(track.leaves.items()):
            key = (contributions.coordinate.get(rank, rank), *slot)
            index = None if leaf.partial else _matching(columns_of.get(key, []), values, leaf.data)
            if index is None:
                index = len(keys)
                keys.append(key)
                origin.append(own)
                values.append(leaf.data.copy())
                columns_of.setdefault(key, []).append(index)
            else:
                hole = np.isnan(values[index])
                values[index][hole] = leaf.data[hole]
            of[(own, *slot)] = index
    summands = {key: len(columns) for key, columns in columns_of.items()}
    return Basis(keys, origin, of, np.array(values) if values else np.empty((0, 0)), summands)


def same_tokens(data: StepData, contributions: Contributions) -> Contributions:
    """Where no label tells which ranks evaluate the same tokens (a cross entropy by hand under tensor parallelism),
    their gradients do: ranks on which at least half of the parameters that both hold got the same ones share a data
    coordinate. So do ranks that hold parts of one model and have the same losses, bit by bit. Peers of a data-parallel
    reduction do not: they were fed one batch."""
    if not contributions.by_key or any(one.label_hash is not None for one in contributions.by_key.values()):
        return contributions
    peers = data_parallel_peers(data.events)
    votes: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for of_param in data.tracks.values():
        for one, other in combinations(sorted(of_param), 2):
            alike = _same_leaves(of_param[one], of_param[other]) if may_share(peers, [one], [other]) else None
            if alike is not None:
                votes[one, other].append(alike)
    representative = dict(contributions.coordinate)
    sharing = {pair for pair, found in votes.items() if 2 * sum(found) >= len(found)}
    for one, other in sorted(sharing | with_one_loss(data)):
        if one in representative and other in representative:
            old, new = representative[other], representative[one]
            sides = ([rank for rank, of in representative.items() if of == way] for way in (old, new))
            if may_share(peers, *sides):
                representative = {rank: new if of == old else of for rank, of in representative.items()}
    if representative == contributions.coordinate or contributions.coordinate_from == "declared":
        return contributions
    kept = sorted(set(representative.values()))
    number = {of: index for index, of in enumerate(kept)}
    coordinate = {rank: number[of] for rank, of in representative.items()}
    by_key = {}
    for (of, *slot), one_of in contributions.by_key.items():
        if of in number:
            key = (number[of], slot[0], slot[1])
            ranks = tuple(rank for rank, index in coordinate.items() if index == number[of])
            by_key[key] = replace(one_of, key=key, ranks=ranks)
    rests = f"inferred: ranks whose gradients or losses are the same share their tokens; {SAME_DATA_SETTING}"
    return replace(contributions, by_key=by_key, coordinate=coordinate, coordinate_from=rests)


def _same_leaves(one: Track, other: Track) -> bool | None:
    """Whether both ranks got the same gradients; None where they hold other elements of the parameter."""
    if not one.leaves or set(one.leaves) != set(other.leaves):
        return False
    for slot, (_, leaf) in one.leaves.items():
        values = other.leaves[slot][1].data
        both = ~np.isnan(leaf.data) & ~np.isnan(values)
        if not both.any():
            return None
        scale = np.linalg.norm(leaf.data[both])
        if scale == 0 or np.linalg.norm(leaf.data[both] - values[both]) > SAME * scale:
            return False
    return True


def _matching(candidates: list[int], values: list[np.ndarray], leaf: np.ndarray) -> int | None:
    """A column of the same contribution that this leaf completes or repeats."""
    for index in candidates:
        both = ~np.isnan(values[index]) & ~np.isnan(leaf)
        if not both.any():
            return index
        scale = np.linalg.norm(leaf[both])
        if np.linalg.norm(values[index][both] - leaf[both]) <= SAME * scale:
            return index
    return None

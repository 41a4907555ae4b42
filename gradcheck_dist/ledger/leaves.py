"""The basis in which gradients are expressed: one column a contribution, out of the leaves of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import Track

SAME = 1e-4
"""Two ranks' leaves are copies of one another when they differ by less than this, relative to their norm."""


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


def build_basis(tracks: dict[int, Track], contributions: Contributions) -> Basis:
    """The columns of one parameter from its tracks on all ranks."""
    keys: list[ContributionKey] = []
    origin: list[int] = []
    of: dict[tuple[int, int, int], int] = {}
    values: list[np.ndarray] = []
    columns_of: dict[ContributionKey, list[int]] = {}
    for rank, track in sorted(tracks.items()):
        for slot, (_, leaf) in sorted(track.leaves.items()):
            key = (contributions.coordinate.get(rank, rank), *slot)
            index = None if leaf.partial else _matching(columns_of.get(key, []), values, leaf.data)
            if index is None:
                index = len(keys)
                keys.append(key)
                origin.append(rank)
                values.append(leaf.data.copy())
                columns_of.setdefault(key, []).append(index)
            else:
                hole = np.isnan(values[index])
                values[index][hole] = leaf.data[hole]
            of[(rank, *slot)] = index
    summands = {key: len(columns) for key, columns in columns_of.items()}
    return Basis(keys, origin, of, np.array(values) if values else np.empty((0, 0)), summands)


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

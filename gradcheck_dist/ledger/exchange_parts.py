"""Sampled elements of what ranks put into an exchange and got out of it, by rank and part, and when they are alike."""

from __future__ import annotations

import numpy as np

from gradcheck_dist.ledger.solve import EPSILON

Parts = dict[int, list[np.ndarray]]
"""By rank: the sampled elements of each part."""

ALIKE = 1e-4
"""Relative difference within which float32 tensors are copies of one another."""
APART = 0.05
"""From which they are not, whatever they were computed in."""


def nearness(dtype: str) -> float:
    """Relative difference within which tensors that were computed in a type are copies of one another."""
    return max(ALIKE, 4 * EPSILON.get(dtype, EPSILON["bfloat16"]))


def total_of(parts: Parts, place: int) -> np.ndarray:
    """One part, summed over the ranks."""
    result: np.ndarray = np.stack([of_rank[place] for of_rank in parts.values()]).sum(0)
    return result


def flat(parts: Parts) -> np.ndarray:
    """All values, rank by rank, shape (values,)."""
    return np.concatenate([part for of_rank in parts.values() for part in of_rank])


def are_near(mine: Parts, theirs: Parts, near: float) -> bool:
    """Whether all values of the one are those of the other, up to the relative distance `near`."""
    one, other = flat(mine), flat(theirs)
    return one.shape == other.shape and bool(np.linalg.norm(one - other) <= near * np.linalg.norm(other))


def _distance(parts: Parts) -> float:
    """The largest difference of any rank's values from the first one's, relative; infinite for unlike shapes."""
    first, *others = (np.concatenate(of_rank) for of_rank in parts.values())
    if any(one.shape != first.shape for one in others):
        return np.inf
    size = max(float(np.linalg.norm(one)) for one in [first, *others])
    return max((float(np.linalg.norm(one - first)) for one in others), default=0.0) / size if size else 0.0


def are_alike(parts: Parts, near: float) -> bool:
    """Whether all ranks hold the same values."""
    return _distance(parts) <= near


def are_apart(parts: Parts) -> bool:
    """Whether some rank's values are surely others."""
    return _distance(parts) >= APART


def could_be_one(given: Parts, made: Parts) -> bool:
    """Whether both sides are as many parts of one size, which no exchange between all explains."""
    sizes = {tuple(map(len, parts)) for side in (given, made) for parts in side.values()}
    return len(sizes) == 1 and len(next(iter(sizes))) > 1


def as_one(parts: Parts) -> Parts:
    """Each rank's parts as a single one."""
    return {rank: [np.concatenate(of_rank)] for rank, of_rank in parts.items()}

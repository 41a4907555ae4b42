"""Which elements of a parameter are sampled. The same on every rank, whatever part of the parameter it holds."""

from __future__ import annotations

import zlib

import numpy as np

SAMPLE_SIZE = 96
"""Elements of a parameter, for the few unknowns of most solves."""
LEAST = 8
"""Elements of a parameter that are asked for at least. Of one or two nothing is measured (a sum of two gradients has
two unknowns, and one more element tells whether it is such a sum), and the records would be believed."""
A_RANK, MOST = 4, 512
"""Each rank of a large world holds a shard and has elements of its own to be seen by: so many, up to so many in all."""


def sample_size_of(world_size: int) -> int:
    """How many elements of a parameter are sampled where nobody says."""
    return max(SAMPLE_SIZE, min(A_RANK * world_size, MOST))


def sample_positions(key: str, num_elements: int, sample_size: int) -> np.ndarray:
    """Sorted flat positions in the global parameter, int64, shape (min(num_elements, sample_size),).

    Drawn without replacement by a generator seeded with `key` (the parameter's shape), so that ranks that hold
    different shards, or copies under other names, agree without talking to each other.
    """
    if num_elements <= sample_size:
        return np.arange(num_elements, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))
    return np.sort(generator.choice(num_elements, sample_size, replace=False, shuffle=False)).astype(np.int64)


def positions_in_box(
    positions: np.ndarray, shape: tuple[int, ...], box_shape: tuple[int, ...], offset: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The sampled positions that lie in a box of the global parameter.

    Args:
        positions: flat positions in the global parameter of `shape`.
        box_shape, offset: the local shard and where it begins, one entry a dimension.

    Returns:
        (which, local): indices into `positions`, and flat positions in the contiguous box, both int64.
    """
    if not shape:
        return np.arange(len(positions)), positions
    coordinates = np.stack(np.unravel_index(positions, shape))
    local = coordinates - np.asarray(offset)[:, None]
    inside = np.all((local >= 0) & (local < np.asarray(box_shape)[:, None]), axis=0)
    which = np.flatnonzero(inside)
    if not len(which):
        return which, which
    return which, np.ravel_multi_index(tuple(local[:, which]), box_shape)

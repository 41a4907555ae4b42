"""Which parts of a function's input on one rank correspond to which parts of its output on the others.

A function that communicates gives each rank parts of what the ranks put in: an all-gather's output has one part from
each of them, an all-to-all has one for each on both sides, an all-reduce one on each side. Shapes tell which. Elements
at the same positions of parts that correspond are compared when a run is judged, so that what the function does
to its input, and its backward to the gradient, is measured and not taken from its name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.stats.sampling import sample_positions

NUM_VALUES = 32
"""Of each part, and fewer where there are many parts."""
MAX_VALUES = 512
MAX_SENT = 8
"""Tensors that a function may take and give which sends them to single ranks."""

Box = tuple[int, int, int]
"""(dimension, begin, length) of a part of a tensor; a dimension of -1 is the whole."""
WHOLE: Box = (-1, 0, 0)


def boxes(
    given: Sequence[Tensor], made: Sequence[Tensor], size: int, splits: tuple[list[int], list[int]] | None
) -> tuple[list[Box], list[Box]] | None:
    """The parts of each of a function's inputs and outputs in a group of `size` ranks, None where shapes tell of none.

    Args:
        splits: lengths of the parts along dimension 0 of an all-to-all, of the output and of the input; empty where
            they are equal; None where nothing was exchanged between all.
    """
    if len(given) == size and len(made) in (1, size) and len({one.dim() for one in given}) == 1 and size > 1:
        if len(made) == size or made[0].shape == given[0].shape:
            return [WHOLE] * size, [WHOLE] * len(made)
        return None
    if len(given) != 1:
        return None
    if len(made) == size and all(one.shape == given[0].shape for one in made):
        return [WHOLE], [WHOLE] * size
    if len(made) != 1:
        return None
    mine, theirs = tuple(given[0].shape), tuple(made[0].shape)
    if abs(len(mine) - len(theirs)) == 1 and splits is None:
        return _stacked(mine, theirs, size)
    return _of_one(mine, theirs, size, splits) if len(mine) == len(theirs) else None


def _stacked(given: tuple[int, ...], made: tuple[int, ...], size: int) -> tuple[list[Box], list[Box]] | None:
    """Parts of which one side holds one from each rank along a dimension of its own (`torch.stack` of a gather)."""
    longer, one = sorted((given, made), key=len, reverse=True)
    dim = next(
        (dim for dim in range(len(longer)) if longer[dim] == size and longer[:dim] + longer[dim + 1 :] == one), None
    )
    if dim is None:
        return None
    together = equal_parts(dim, size, size)
    return ([WHOLE], together) if longer is made else (together, [WHOLE])


def goes_on(given: Sequence[tuple[int, Tensor]], made: Sequence[Tensor]) -> tuple[int, Tensor] | None:
    """The one of several inputs, with its place, that has the shape of the only output: others (a bias) join it."""
    alike = [(place, one) for place, one in given if len(made) == 1 and one.shape == made[0].shape]
    return alike[0] if len(given) > 1 and len(alike) == 1 and not alike[0][1].is_leaf else None


def one_to_one(args: Sequence[Any], results: Any) -> tuple[Tensor, Tensor] | None:
    """A function's only differentiable input, and its output, where that has the same shape."""
    given = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    if len(given) != 1 or not isinstance(results, Tensor) or results.shape != given[0].shape:
        return None
    return (given[0], results) if is_plain(given[0]) and is_plain(results) else None


def is_swap_by_gather(calls: Sequence[str], given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether a function that gathers gives as much as it takes, as an all-to-all does: a part for each rank of what
    each rank holds, along dimension 0. (If it adds up what it gathered, parts of both are compared as one.)"""
    gathers = bool(calls) and all(name.startswith("all_gather") for name in calls)
    return gathers and len(given) == len(made) == 1 and given[0].shape == made[0].shape and given[0].dim() > 0


def each_whole(given: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[list[Box], list[Box]] | None:
    """Of a function that sends tensors to single ranks each tensor is a part; None where there are too many."""
    return ([WHOLE] * len(given), [WHOLE] * len(made)) if len(given) + len(made) <= MAX_SENT else None


def _of_one(
    given: tuple[int, ...], made: tuple[int, ...], size: int, splits: tuple[list[int], list[int]] | None
) -> tuple[list[Box], list[Box]] | None:
    unlike = [dim for dim, (one, other) in enumerate(zip(given, made, strict=True)) if one != other]
    if splits is not None and set(unlike) <= {0} and given:
        mine, theirs = rows(splits[1], given[0], size), rows(splits[0], made[0], size)
        if mine is not None and theirs is not None:
            return mine, theirs
        if splits != ([], []):
            return None
    if not unlike:
        return [WHOLE], [WHOLE]
    grown = [dim for dim in unlike if made[dim] == given[dim] * size]
    shrunk = [dim for dim in unlike if made[dim] * size == given[dim]]
    if len(grown) + len(shrunk) != len(unlike) or len(grown) > 1 or len(shrunk) > 1:
        return None
    return (
        equal_parts(shrunk[0], given[shrunk[0]], size) if shrunk else [WHOLE],
        equal_parts(grown[0], made[grown[0]], size) if grown else [WHOLE],
    )


def equal_parts(dim: int, length: int, size: int) -> list[Box]:
    """As many parts of one length along a dimension."""
    return [(dim, index * length // size, length // size) for index in range(size)]


def rows(lengths: list[int], total: int, size: int) -> list[Box] | None:
    """Parts of these lengths along dimension 0, or `size` equal ones; None where they make no `total`."""
    if not lengths:
        return equal_parts(0, total, size) if total % size == 0 else None
    if len(lengths) != size or sum(lengths) != total:
        return None
    ends = np.cumsum(lengths)
    return [(0, int(end) - length, length) for end, length in zip(ends, lengths, strict=True)]


def num_of_each(parts: tuple[Sequence[Box], Sequence[Box]]) -> int:
    """How many elements of each part are taken, as many on both sides: those that correspond are compared."""
    return max(4, min(NUM_VALUES, MAX_VALUES // max(map(len, parts))))


def take(tensors: Sequence[Tensor], parts: Sequence[Box], num: int | None = None) -> tuple[Tensor, tuple[int, ...]]:
    """Up to `num` elements of each part, as float32, shape (sum of counts,), and how many of each."""
    num = num or num_of_each((parts, parts))
    found, counts = [], []
    for index, box in enumerate(parts):
        tensor = tensors[index] if len(tensors) > 1 else tensors[0]
        where = _positions(tuple(tensor.shape), box, num, tensor.device)
        found.append(tensor.detach().take(where).float())
        counts.append(len(where))
    return torch.cat(found), tuple(counts)


def unread(tensors: Sequence[Tensor], parts: Sequence[Box], num: int) -> tuple[Tensor, tuple[int, ...]]:
    """As `take`, with no number in the place of each element: of tensors whose values are not there yet."""
    shapes = [tuple((tensors[index] if len(tensors) > 1 else tensors[0]).shape) for index in range(len(parts))]
    device = tensors[0].device
    counts = tuple(len(_positions(shape, box, num, device)) for shape, box in zip(shapes, parts, strict=True))
    return torch.full((sum(counts),), torch.nan, device=device), counts


@functools.lru_cache(maxsize=4096)
def _positions(shape: tuple[int, ...], box: Box, num: int, device: torch.device) -> Tensor:
    dim, begin, length = box
    part = shape if dim < 0 else (*shape[:dim], length, *shape[dim + 1 :])
    count = int(np.prod(part))
    inside = sample_positions("exchange", count, num)
    if dim >= 0 and count:
        coordinates = list(np.unravel_index(inside, part))
        coordinates[dim] = coordinates[dim] + begin
        inside = np.ravel_multi_index(tuple(coordinates), shape).astype(np.int64)
    return torch.from_numpy(inside).to(device)

"""One matrix that lies on several pipeline stages, as embedding on one and as output head on another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from gradcheck_dist.events import Param
from gradcheck_dist.trace.run import Run

Key = tuple[int, str]
"""(pipeline stage, name), as tracks.ParamKey."""


@dataclass
class _Copy:
    """A parameter on the ranks that hold it."""

    key: Key
    param: Param
    starts: dict[int, int | None]

    @property
    def values(self) -> frozenset[int]:
        return frozenset(start for start in self.starts.values() if start is not None)

    def began_as(self, other: _Copy) -> bool:
        """Whether both held the same values when they were first seen, which were not all one number. Their ranks are
        others, or the same."""
        mine, theirs = self.param, other.param
        return (
            bool(self.values)
            and self.values == other.values
            and (mine.shape, mine.dtype, mine.placements) == (theirs.shape, theirs.dtype, theirs.placements)
            and mine.num_positions == theirs.num_positions
            and (self.starts.keys().isdisjoint(other.starts) or self.starts == other.starts)
        )


def ties(run: Run, names: Mapping[tuple[int, int], Key] | None = None) -> dict[Key, Key]:
    """Copies of one parameter on other ranks: for each but the first the first.

    Several processes cannot share a tensor, so nothing but its values tells that a matrix on one stage is the one on
    another. Equal values alone are no proof: ranks with one seed draw alike, and layers are cloned. So one of the two
    has to be the weight of an embedding, both stages must hold other weights, and none of those may have begun
    alike on both.

    Args:
        names: the key of each (rank, parameter id); None takes those that the ranks recorded.
    """
    return ties_and_doubts(run, names)[0]


def ties_and_doubts(
    run: Run, names: Mapping[tuple[int, int], Key] | None = None
) -> tuple[dict[Key, Key], list[tuple[Key, Key]]]:
    """`ties`, and pairs of an embedding and another matrix of ranks that hold nothing else of which one seed would
    have drawn alike (a last stage of a norm and a head): one parameter, or two that were drawn by one seed."""
    first: dict[Key, Key] = {}
    doubts: list[tuple[Key, Key]] = []
    for pairs, surely in _pairs(run, names, on_one_rank=False):
        for one, other in pairs if surely else []:
            first[other] = first.get(one, one)
        doubts += pairs if not surely and len(pairs) == 1 else []
    return first, doubts


def beside(run: Run, names: Mapping[tuple[int, int], Key]) -> dict[Key, Key]:
    """Two copies of one parameter on the same ranks, in two stages that these hold (a schedule in the shape of a V):
    for each the other one. Told as `ties` are."""
    both: dict[Key, Key] = {}
    for pairs, surely in _pairs(run, names, on_one_rank=True):
        for one, other in pairs if surely else []:
            both |= {one: other, other: one}
    return both


def _pairs(
    run: Run, names: Mapping[tuple[int, int], Key] | None, on_one_rank: bool
) -> Iterator[tuple[list[tuple[Key, Key]], bool]]:
    """Of each two places the pairs of an embedding and what began as it, and whether both hold what tells that apart
    from draws of one seed."""
    copies: dict[Key, _Copy] = {}
    for rank, trace in run.ranks.items():
        for param in trace.params.values():
            recorded = (-1 if param.stage is None else param.stage, param.name)
            key = recorded if names is None else names.get((rank, param.id))
            if key is not None and param.requires_grad:
                copies.setdefault(key, _Copy(key, param, {})).starts[rank] = param.start
    places: dict[tuple[int, frozenset[int]], list[_Copy]] = defaultdict(list)
    for copy in copies.values():
        if copy.values:
            places[copy.key[0], frozenset(copy.starts)].append(copy)
    for (one, here), (other, there) in combinations(sorted(places.items(), key=lambda item: sorted(item[0][1])), 2):
        if one[1] == other[1] if on_one_rank else one[1].isdisjoint(other[1]):
            yield _tied(here, there)


def _tied(here: list[_Copy], there: list[_Copy]) -> tuple[list[tuple[Key, Key]], bool]:
    pairs = [(one, other) for one in here for other in there if one.began_as(other)]
    embedded = [(one, other) for one, other in pairs if one.param.looked_up or other.param.looked_up]
    if len(embedded) < len(pairs):
        return [], False
    tied = {copy.key for pair in embedded for copy in pair}
    told_apart = not any(all(copy.key in tied for copy in held) for held in (here, there))
    if not told_apart:  # tables of one seed are no copies of one another
        embedded = [(one, other) for one, other in embedded if one.param.looked_up != other.param.looked_up]
    return [(one.key, other.key) for one, other in embedded], told_apart


def told(first: Key, copies: list[Key]) -> str:
    """That these are judged as one parameter, in words."""
    others = " and ".join(_place(key) for key in copies)
    return (
        f"{others} began with the values of {_place(first)}, an embedding's: they are judged as one tied parameter, "
        f"under the name {first[1]}"
    )


def told_beside(one: Key, other: Key) -> str:
    """That each of these should hold the gradient of both, in words."""
    return (
        f"{_place(other)} began with the values of {_place(one)}, and one of them is an embedding's: they are judged "
        "as copies of one tied parameter, each of which should hold the gradient of both"
    )


def _place(key: Key) -> str:
    return key[1] if key[0] < 0 else f"{key[1]} of stage {key[0]}"

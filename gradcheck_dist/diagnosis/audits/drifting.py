"""Copies of a parameter that ranks reduce together, and that do not stay alike.

A pair of ranks is told by what an optimizer had left and by what the next step begins with: both have to be unlike in
the same direction. What is moved apart for one step (sharpness-aware perturbations, noise on weights that is taken
back) is unlike in one of them, or in directions that have nothing to do with one another; what is sent behind the step
(ZeRO) is alike again in the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from gradcheck_dist.diagnosis.audits.facts import StepFacts
from gradcheck_dist.diagnosis.audits.unlike import reductions_of
from gradcheck_dist.events import OptimizerStep, Reduce, Replica
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import ParamKey, Track, merge

SPACINGS = 16
"""More than half of the elements differ by so many: the order of a sum makes one or two, as rounding by chance does."""
TOGETHER = 0.5
"""The cosine between both differences, at least."""
SAME_RATIO = 1e-2
"""Relative: one number by which updates differ."""


@dataclass(frozen=True)
class Drifting:
    """A parameter whose gradients `event` joins on `rank`, and its ranks by the values that they hold.

    `alike_at_first`: whether they were equal when the first recorded step began, None where nobody looked;
    `moved_alike`: and so were they when its optimizer had stepped.
    `ratio`: of the updates that this one made, the last rank's to the first one's; None where it is not one number."""

    param: ParamKey
    rank: int
    event: Reduce
    holders: tuple[tuple[int, ...], ...]
    alike_at_first: bool | None
    moved_alike: bool
    ratio: float | None


Ends = tuple[np.ndarray, np.ndarray]
"""What an optimizer had left of a parameter, and what the step begins with."""


def drifting(facts: StepFacts) -> Iterator[Drifting]:
    """The copies that this step began with unlike, each parameter once."""
    seen = _ends(facts)
    mixed = {one.param for one in facts.mixed.unlike}
    for key, of_rank in facts.data.tracks.items():
        if key in mixed:
            continue  # no copies
        ends = {rank: both for rank in of_rank if (both := seen.get((rank, key))) is not None}
        for rank, event, group in reductions_of(facts.data, key, of_rank) if len(ends) > 1 else ():
            held = {peer: ends[peer] for peer in group if peer in ends}
            holders = _holders(held, max(EPSILON["float32"], EPSILON.get(of_rank[rank].param.dtype, 0.0)))
            if len(holders) > 1 and _is_joined(facts, key, holders, event):
                yield _drifting(key, rank, event, holders, of_rank)
                break


def _ends(facts: StepFacts) -> dict[tuple[int, ParamKey], Ends]:
    """Of each rank and parameter that its own optimizer steps."""
    found: dict[tuple[int, ParamKey], Ends] = {}
    keys = {(rank, track.param.id): key for key, of in facts.data.tracks.items() for rank, track in of.items()}
    for rank, events in facts.data.events.items():
        stepped = {
            id
            for event in events
            if isinstance(event, OptimizerStep)
            for id in facts.data.params_of(rank, event.params)
        }
        begun = next((event for event in events if isinstance(event, Replica) and event.values), None)
        if begun is None:
            continue
        left, now = np.frombuffer(begun.values, dtype="<f4").astype(float).reshape(2, -1)
        cuts = np.cumsum(begun.counts)[:-1]
        for param, one, other in zip(begun.params, np.split(left, cuts), np.split(now, cuts), strict=True):
            if param in stepped and (rank, param) in keys:
                found[rank, keys[rank, param]] = one, other
    return found


def _holders(held: dict[int, Ends], epsilon: float) -> tuple[tuple[int, ...], ...]:
    """The ranks by what they hold; in one part where some are neither alike nor unlike."""
    together = [
        {one, other} for one, other in combinations(held, 2) if not _are_unlike(held[one], held[other], epsilon)
    ]
    return tuple(sorted(tuple(sorted(part)) for part in merge([{rank} for rank in held], together)))


def _are_unlike(one: Ends, other: Ends, epsilon: float) -> bool:
    if len(one[0]) != len(other[0]) or not all(np.isfinite(values).all() for values in (*one, *other)):
        return False
    left, begun = one[0] - other[0], one[1] - other[1]
    far = np.abs(begun) > SPACINGS * epsilon * np.maximum(np.abs(one[1]), np.abs(other[1]))
    sizes = float(np.linalg.norm(left) * np.linalg.norm(begun))
    return 2 * int(far.sum()) > len(far) and float(left @ begun) >= TOGETHER * sizes > 0.0


def _is_joined(facts: StepFacts, key: ParamKey, holders: tuple[tuple[int, ...], ...], event: Reduce) -> bool:
    """Whether what an optimizer reads on one of these ranks holds gradients of others that hold something else; where
    no weight is known, what a wrapper reduces is read."""
    place = facts.contributions.coordinate
    known = [held for held in facts.held if held.param == key and held.cells]
    if not known:
        return event.wrapper is not None
    for held in known:
        mine = next((part for part in holders if held.rank in part), ())
        others = {place.get(rank, rank) for part in holders if part != mine for rank in part}
        others -= {place.get(rank, rank) for rank in mine}
        if mine and any(cell.key[0] in others and not cell.gone for cell in held.cells):
            return True
    return False


def _drifting(
    key: ParamKey, rank: int, event: Reduce, holders: tuple[tuple[int, ...], ...], of_rank: dict[int, Track]
) -> Drifting:
    first, last = of_rank[holders[0][0]], of_rank[holders[-1][0]]
    everyone = [of_rank[peer] for part in holders for peer in part]
    alike = None
    if all(track.begun is not None for track in everyone):
        alike = all(_are_equal(first.begun, track.begun) for track in everyone)
    moved = bool(alike) and all(_are_equal(first.left, track.left) for track in everyone)
    return Drifting(key, rank, event, holders, alike, moved, _ratio(first, last) if alike and not moved else None)


def _are_equal(mine: np.ndarray | None, theirs: np.ndarray | None) -> bool:
    return mine is not None and theirs is not None and np.array_equal(mine, theirs, equal_nan=True)


def _ratio(first: Track, last: Track) -> float | None:
    """The last rank's update in the first recorded step, as a multiple of the first one's."""
    if first.begun is None or first.left is None or last.begun is None or last.left is None:
        return None
    mine, theirs = (one.left.astype(float) - one.begun for one in (first, last))  # type: ignore[union-attr]
    size = float(mine @ mine)
    ratio = float(mine @ theirs) / size if size > 0.0 else 0.0
    return (
        ratio if ratio > 0.0 and np.linalg.norm(theirs - ratio * mine) <= SAME_RATIO * np.linalg.norm(theirs) else None
    )

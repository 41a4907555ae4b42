"""Ranks that reduce a parameter's gradient together, and update it each in its own way.

What an optimizer is told (its learning rate, its weight decay) is to be one number on all of them, be they copies or
shards. And copies have to stay alike. A pair of ranks is told by what an optimizer had left and by what the next step
begins with: both have to be unlike in the same direction. What is moved apart for one step (sharpness-aware
perturbations, noise on weights that is taken back) is unlike in one of them, or in directions that have nothing to do
with one another; what is sent behind the step (ZeRO) is alike again in the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradcheck_dist.diagnosis.audits.facts import StepFacts
from gradcheck_dist.diagnosis.audits.unlike import reductions_of
from gradcheck_dist.events import Exchange, OptimizerStep, Reduce, Replica
from gradcheck_dist.ledger.param_updates import in_two_rows
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import ParamKey, Track, merge

GONE_APART = "copies that are reduced together have gone apart"
SPACINGS = 16
"""More than half of the elements differ by so many: the order of a sum makes one or two, as rounding by chance does."""
TOGETHER = 0.9
"""The cosine between both differences, at least, of all parameters that two ranks hold."""
FEWEST = 16
"""Of fewer numbers two differences are near to one direction by chance."""
SAME_NUMBER = 1e-6
"""Relative: what one formula gives on all ranks."""


@dataclass(frozen=True)
class Drifting:
    """A parameter whose gradients are reduced together, and its ranks by the values that they hold.

    `alike_at_first`: whether they were equal when the first recorded step began; `moved_alike`: and still were when its
    optimizer had stepped; None where nobody looked.
    """

    param: ParamKey
    holders: tuple[tuple[int, ...], ...]
    alike_at_first: bool | None
    moved_alike: bool | None


@dataclass(frozen=True)
class OwnNumbers:
    """A parameter, and a number of optimizers, `name`, that is not the same for it on all ranks of `by_rank`. `event`
    joins its gradients there; None where ranks work on one batch and hold copies of it."""

    param: ParamKey
    event: Reduce | None
    name: str
    by_rank: dict[int, float]


Ends = tuple[np.ndarray, np.ndarray]
"""What an optimizer had left of a parameter, and what the step begins with."""


def drifting(facts: StepFacts) -> Iterator[Drifting]:
    """The copies that this step began with unlike, each parameter once."""
    seen = _ends(facts)
    pairs = _Pairs(seen)
    mixed = {one.param for one in facts.mixed.unlike}
    for key, of_rank in facts.data.tracks.items():
        if key in mixed:
            continue  # no copies
        ends = {rank: both for rank in of_rank if (both := seen.get((rank, key))) is not None}
        if len({begun.tobytes() for _, begun in ends.values()}) < 2:
            continue
        for rank, event, group in reductions_of(facts.data, key, of_rank):
            held = {peer: ends[peer] for peer in group if peer in ends}
            epsilon = max(EPSILON["float32"], EPSILON.get(of_rank[rank].param.dtype, 0.0))
            holders = _holders(held, epsilon, pairs)
            if len(holders) > 1 and _is_joined(facts, key, holders, event):
                yield _drifting(key, holders, of_rank)
                break


def own_numbers(facts: StepFacts) -> Iterator[OwnNumbers]:
    """The parameters that ranks step with numbers of their own, each once."""
    told = _told(facts)
    mixed = {one.param for one in facts.mixed.unlike}
    for key, of_rank in facts.data.tracks.items():
        if key not in mixed and (found := _own_numbers(facts, key, of_rank, told)) is not None:
            yield found


def _own_numbers(
    facts: StepFacts, key: ParamKey, of_rank: dict[int, Track], told: dict[tuple[int, ParamKey], dict[str, float]]
) -> OwnNumbers | None:
    numbers = [told[rank, key] for rank in of_rank if (rank, key) in told]
    if all(one == numbers[0] for one in numbers):
        return None
    for event, ranks in [*_reducing(facts, of_rank), *_sharing(facts, of_rank)]:
        held = {peer: told[peer, key] for peer in sorted(ranks) if (peer, key) in told}
        for name in sorted(set[str]().union(*held.values())):
            by_rank = {peer: own[name] for peer, own in held.items() if name in own}
            parts = _parts(by_rank)
            if len(parts) > 1 and (event is None or _is_joined(facts, key, parts, event)):
                return OwnNumbers(key, event, name, by_rank)
    return None


def _reducing(facts: StepFacts, of_rank: dict[int, Track]) -> Iterator[tuple[Reduce, set[int]]]:
    """The ranks that reductions of a parameter's gradient join, over shards and replicas, and the first of these."""
    found = [
        (event, {*event.group, *event.replicate_group})
        for rank, event in facts.events_of(Reduce)
        if rank in of_rank and of_rank[rank].param.id in facts.data.params_of(rank, event.params)
    ]
    for joined in merge([{rank} for rank in of_rank], [ranks for _, ranks in found]):
        if len(joined) > 1:
            yield next(event for event, ranks in found if ranks & joined), joined


def _sharing(facts: StepFacts, of_rank: dict[int, Track]) -> Iterator[tuple[None, set[int]]]:
    """Ranks that exchange activations of one batch, and began with the same values of a parameter."""
    place = facts.contributions.coordinate
    groups = {
        frozenset(peer for peer in event.group if peer in of_rank and place.get(peer) == place.get(rank))
        for rank, event in facts.events_of(Exchange)
        if rank in of_rank
    }
    for ranks in sorted(groups, key=sorted):
        if len(ranks) > 1 and _are_equal([of_rank[rank].begun for rank in ranks]):
            yield None, set(ranks)


def _parts(by_rank: dict[int, float]) -> tuple[tuple[int, ...], ...]:
    """The ranks by their number; in one part where all are what one formula gives."""
    numbers = by_rank.values()
    if max(numbers) - min(numbers) <= SAME_NUMBER * max(map(abs, numbers)):
        return (tuple(by_rank),)
    return tuple(tuple(rank for rank in by_rank if by_rank[rank] == number) for number in dict.fromkeys(numbers))


def _told(facts: StepFacts) -> dict[tuple[int, ParamKey], dict[str, float]]:
    """Of each rank and parameter: what the last optimizer that stepped it was told."""
    found: dict[tuple[int, ParamKey], dict[str, float]] = {}
    for rank, step in facts.events_of(OptimizerStep):
        stepped = facts.params_in(rank, step.params)
        for group in step.groups or (step,):
            numbers = group.hyperparameters if group.lr is None else {**group.hyperparameters, "lr": group.lr}
            found |= {(rank, key): numbers for key in facts.params_in(rank, group.params) & stepped}
    return found


def _ends(facts: StepFacts) -> dict[tuple[int, ParamKey], Ends]:
    """Of each rank and parameter that its own optimizer steps."""
    stepped: dict[int, dict[int, ParamKey]] = defaultdict(dict)  # by rank, parameters by their ids
    for rank, step in facts.events_of(OptimizerStep):
        stepped[rank] |= {facts.data.tracks[key][rank].param.id: key for key in facts.params_in(rank, step.params)}
    found: dict[tuple[int, ParamKey], Ends] = {}
    for rank, begun in facts.events_of(Replica):
        for param, left, now in in_two_rows(begun):
            if param in stepped[rank]:
                found.setdefault((rank, stepped[rank][param]), (left.astype(float), now.astype(float)))
    return found


class _Pairs:
    """Whether what two ranks hold differs in one direction, as an optimizer left it and as the step begins."""

    def __init__(self, seen: dict[tuple[int, ParamKey], Ends]) -> None:
        self._of_rank: dict[int, dict[ParamKey, Ends]] = defaultdict(dict)
        for (rank, key), ends in seen.items():
            self._of_rank[rank][key] = ends
        self._known: dict[tuple[int, int], bool] = {}

    def go_together(self, one: int, other: int) -> bool:
        if (one, other) not in self._known:
            self._known[one, other] = self._go_together(self._of_rank[one], self._of_rank[other])
        return self._known[one, other]

    def _go_together(self, mine: dict[ParamKey, Ends], theirs: dict[ParamKey, Ends]) -> bool:
        both = [(mine[key], theirs[key]) for key in mine if key in theirs and _comparable(mine[key], theirs[key])]
        if sum(len(one[0]) for one, _ in both) < FEWEST:
            return False
        left, begun = (np.concatenate([one[end] - other[end] for one, other in both]) for end in (0, 1))
        sizes = float(np.linalg.norm(left) * np.linalg.norm(begun))
        return float(left @ begun) >= TOGETHER * sizes > 0.0


def _holders(held: dict[int, Ends], epsilon: float, pairs: _Pairs) -> tuple[tuple[int, ...], ...]:
    """The ranks by what they hold, the lowest of each first."""
    alike: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
    for rank, (left, begun) in sorted(held.items()):
        alike[left.tobytes(), begun.tobytes()].append(rank)
    holders: list[list[int]] = []
    for ranks in alike.values():
        for part in holders:
            if not _are_far(held[part[0]], held[ranks[0]], epsilon) or not pairs.go_together(part[0], ranks[0]):
                part.extend(ranks)
                break
        else:
            holders.append(ranks)
    return tuple(tuple(sorted(ranks)) for ranks in holders)


def _comparable(one: Ends, other: Ends) -> bool:
    return len(one[0]) == len(other[0]) and all(np.isfinite(values).all() for values in (*one, *other))


def _are_far(one: Ends, other: Ends, epsilon: float) -> bool:
    """Whether most of what the step begins with differs by more than rounding."""
    if not _comparable(one, other):
        return False
    allowed = SPACINGS * epsilon * np.maximum(np.abs(one[1]), np.abs(other[1]))
    return bool(2 * (np.abs(one[1] - other[1]) > allowed).sum() > len(one[1]))


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


def _drifting(key: ParamKey, holders: tuple[tuple[int, ...], ...], of_rank: dict[int, Track]) -> Drifting:
    everyone = [of_rank[peer] for part in holders for peer in part]
    alike = _are_equal([track.begun for track in everyone])
    moved = _are_equal([track.left for track in everyone]) if alike else None
    return Drifting(key, holders, alike, moved)


def _are_equal(values: list[np.ndarray | None]) -> bool | None:
    known = [one for one in values if one is not None]
    return all(np.array_equal(one, known[0], equal_nan=True) for one in known) if len(known) == len(values) else None

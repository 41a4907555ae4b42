"""What happened to gradients on their way from one pipeline stage to the next.

An earlier stage differentiates what a later one sent: a factor between them scales its whole gradient, and its own
leaves show nothing of it. The probes sample both ends; the end that was sent is found by its values: it belongs to the
same tokens and is, element by element, a multiple of what entered.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from math import prod

import numpy as np

from gradcheck_dist.events import Backward, Event, LossGradient, StageGradient
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.misplaced import Misplaced, misplaced, slots, unused
from gradcheck_dist.ledger.solve import EPSILON, ROUNDING
from gradcheck_dist.ledger.tracks import Slot, StepData
from gradcheck_dist.wording import numbered

MIN_ELEMENTS = 8
"""Elements other than zero that must be multiples of one another with one factor: fewer prove nothing."""
RESIDUAL = 4 * EPSILON["bfloat16"]
"""How far they may be from it, relative to their norm: what is sent may be rounded to any type on the way."""
UNTOUCHED = 1e-5
"""A factor nearer to 1 than this is 1."""
SIGMAS = 6.0
MAX_PARTS = 16
"""Earlier microbatches that are looked for in one gradient, its own among them."""
STALE_RESIDUAL = 1e-4
"""How far a gradient may be from the sum of several, relative to its norm, or so many spacings of its type."""
STALE_SPACINGS = 2
MAX_TOLD = 3
"""Passes that are named in a sentence."""
LEAST_PART = 0.05
"""A smaller part of an earlier gradient may be noise; what is added up is all of it."""

NO_GRADIENT = "outputs no gradient but zero"
SOME_ALONE = "the stage before differentiates some alone"

Place = tuple[int, int, Slot]
"""(rank, stage, -1 without one; accumulation step and microbatch)"""


@dataclass(frozen=True)
class Hop:
    """A factor between two stages. `left` is the backward pass that sent the gradient, on `rank`, `entered` the one
    that it was handed to. `noise` is the factor's relative standard error."""

    factor: float
    noise: float
    rank: int
    left: Event | None
    entered: Event | None


@dataclass(frozen=True)
class Stale:
    """A gradient that was handed to `place` together with those of earlier microbatches: `parts` are the slots and by
    how much each was in it, the own one last. `left` is the backward pass of `rank` that made the own part."""

    place: Place
    parts: tuple[tuple[Slot, float], ...]
    rank: int
    left: Event | None


@dataclass
class Transits:
    """By place, the hops between it and the loss that changed its gradient. `unmatched` are ranks of whose gradients
    it was not seen from where they came, `matched` those of which it was. `strange` are passes that began with a
    gradient of the shape of those that another stage sent, and with none of these, or one that another began with;
    `misplaced` are those that gave an output the gradient of other activations, or none, `unused` those that sent one
    which no pass begins with."""

    hops: dict[Place, tuple[Hop, ...]] = field(default_factory=dict)
    stale: list[Stale] = field(default_factory=list)
    matched: set[int] = field(default_factory=set)
    unmatched: set[int] = field(default_factory=set)
    strange: list[Place] = field(default_factory=list)
    misplaced: list[Misplaced] = field(default_factory=list)
    unused: list[Place] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Why nobody knows whether gradients are right that came from another stage, in words."""
        return [*self._strange, *self._lost]

    @property
    def _lost(self) -> list[str]:
        found = []
        for places, words in (
            (
                [one.place for one in self.misplaced if one.sent is None],
                f"backward gives {NO_GRADIENT}, though what the next stage was given of such an output has one",
            ),
            (
                self.unused,
                f"gradients are sent for several activations that were received, of which {SOME_ALONE}: what comes "
                "back for the others is lost",
            ),
        ):
            if places:
                ranks = numbered("rank", {rank for rank, _, _ in places})
                found.append(f"on {ranks}, {words}: pass {', '.join(slots(places, MAX_TOLD))}")
        return found

    @property
    def _strange(self) -> list[str]:
        if not self.strange:
            return []
        ranks = numbered("rank", {rank for rank, _, _ in self.strange})
        return [
            f"on {ranks}, backward begins with gradients of other stages that are none of those which left these, "
            f"times one number for all, or one of them again: pass {', '.join(slots(self.strange, MAX_TOLD))}. Where "
            "they are compressed on the way, that is meant; else look at which microbatch's is received, and at what "
            "is done to it"
        ]

    @property
    def remarks(self) -> list[str]:
        """What was not seen, in words."""
        if not self.unmatched:
            return []
        ranks = numbered("rank", self.unmatched)
        return [
            f"on {ranks}, backward begins with gradients that match none that was seen to leave another stage: what "
            "was done to them on the way between ranks is not known"
        ]

    @property
    def all_hops(self) -> list[Hop]:
        return [hop for hops in self.hops.values() for hop in hops]

    def on_the_way(self, rank: int, stage: int, slot: Slot) -> tuple[Hop, ...]:
        return self.hops.get((rank, stage, slot), ())


def gain(hops: tuple[Hop, ...]) -> float:
    """By how much a gradient was scaled before it came to a stage."""
    return prod(hop.factor for hop in hops)


def transits(data: StepData, contributions: Contributions) -> Transits:
    """Match what entered each stage with what left another one."""
    entered: dict[Place, list[StageGradient]] = defaultdict(list)
    left: dict[Slot, list[tuple[Place, StageGradient]]] = defaultdict(list)
    for rank, of_rank in data.events.items():
        for event in of_rank:
            if isinstance(event, StageGradient):
                place = _place(rank, event)
                if event.side == "output":
                    entered[place].append(event)
                else:
                    left[place[2]].append((place, event))
    result = Transits()
    sources: dict[Place, tuple[Place, Hop]] = {}
    unmatched: list[Place] = []
    for place, ends in entered.items():
        found = _source(data, contributions, place, ends, left[place[2]])
        if found is not None:
            sources[place] = found
        elif (stale := _stale(data, contributions, place, ends, left)) is not None:
            result.stale.append(stale)
            continue
        if found is None:
            unmatched.append(place)
    known: dict[tuple[int, int], list[Hop]] = defaultdict(list)
    for (rank, stage, _), (_, hop) in sources.items():
        known[rank, stage].append(hop)
    for place in unmatched:
        of_stage = known.get(place[:2], [])
        found = _source(data, contributions, place, entered[place], left[place[2]], least=1) if of_stage else None
        if found is not None and any(_as_much(found[1], hop) for hop in of_stage):
            sources[place] = found
    result.matched = {rank for rank, _, _ in sources}
    result.unmatched = {place[0] for place in unmatched if place not in sources}
    explained = {one.place for one in result.stale}
    lossless = {rank for rank, events in data.events.items() if not any(isinstance(e, LossGradient) for e in events)}
    result.strange = [
        one
        for one in _strange(contributions, entered, left, sources)
        if one not in explained and (one[1] >= 0 or one[0] in lossless)  # else it may be from this rank's own loss
    ]
    sent = [pair for of_slot in left.values() for pair in of_slot]
    told = {*explained, *result.strange}
    result.misplaced = [
        one._replace(entered=_backward(data, one.place))
        for one in misplaced(entered, sent, told, functools.partial(_may_hand_over, contributions), multiple)
    ]
    result.unused = unused(entered, sent, {place: at for place, (at, _) in sources.items()})
    for place in sources:
        chain, at = [], place
        seen = {at}
        while at in sources:
            at, hop = sources[at]
            if at in seen:
                break
            seen.add(at)
            chain.append(hop)
        # A stage behind which the way is lost is taken as it was seen up to there.
        changed = tuple(hop for hop in reversed(chain) if abs(hop.factor - 1) > max(UNTOUCHED, SIGMAS * hop.noise))
        if changed:
            result.hops[place] = changed
    return result


def _place(rank: int, event: StageGradient | Backward) -> Place:
    return (rank, -1 if event.stage is None else event.stage, (event.accumulation_step, event.microbatch))


def _source(
    data: StepData,
    contributions: Contributions,
    place: Place,
    ends: list[StageGradient],
    left: list[tuple[Place, StageGradient]],
    least: int = MIN_ELEMENTS,
) -> tuple[Place, Hop] | None:
    """The stage that sent all that entered here, and the one factor on the way; None where that is not clear. `least`:
    how many elements have to show it."""
    options: dict[Place, list[tuple[float, float]]] = {}
    for other, sent in left:
        if not _may_hand_over(contributions, other, place):
            continue
        for end in ends:
            found = multiple(end, sent, least)
            if found is not None:
                options.setdefault(other, []).append(found)
    whole = {other: found for other, found in options.items() if len(found) >= len(ends)}
    if not whole:
        return None
    # Copies of one gradient (tensor parallel) all fit; of different factors the one nearest to 1 is believed.
    other = min(whole, key=lambda place: max(abs(factor - 1) for factor, _ in whole[place]))
    factors, noises = zip(*whole[other], strict=True)
    factor, noise = factors[0], sum(noises)
    if max(factors) - min(factors) > max(UNTOUCHED, SIGMAS * noise) * abs(factor):
        return None
    hop = Hop(factor, noise, other[0], _backward(data, other), _backward(data, place))
    return other, hop


def _strange(
    contributions: Contributions,
    entered: dict[Place, list[StageGradient]],
    left: dict[Slot, list[tuple[Place, StageGradient]]],
    sources: dict[Place, tuple[Place, Hop]],
) -> list[Place]:
    """The places whose gradients are of the shape of those that left other stages, and are none of these. Stages may
    run microbatches in orders of their own, where each of these gradients enters one pass."""
    found: list[Place] = []
    taken: set[int] = set()
    sent = [pair for of_slot in left.values() for pair in of_slot]
    for place in sorted(entered, key=lambda place: place not in sources):
        factors: list[float] = []
        for end in entered[place] if place in sources else filter(_tells, entered[place]):
            alike = [pair for pair in sent if pair[1].shape == end.shape and _tells(pair[1])]
            alike = [pair for pair in alike if _may_hand_over(contributions, pair[0], place)]
            fitting = [(one, told[0]) for other, one in alike
                       if place not in sources or other == sources[place][0]
                       if id(one) not in taken and (told := multiple(end, one)) is not None]  # fmt: skip
            if fitting:
                taken.add(id(fitting[0][0]))
                factors.append(fitting[0][1])
            elif alike and place not in sources:
                found.append(place)
                break
        else:
            if place not in sources and factors and max(factors) - min(factors) > RESIDUAL * abs(factors[0]):
                found.append(place)
    return sorted(found)


def _tells(end: StageGradient) -> bool:
    return int(np.count_nonzero(np.frombuffer(end.values, dtype="<f4"))) >= MIN_ELEMENTS


def _may_hand_over(contributions: Contributions, other: Place, place: Place) -> bool:
    """Whether one stage may be behind the other, of the same tokens."""
    (rank, stage, _), coordinate = place, contributions.coordinate
    if coordinate.get(other[0]) != coordinate.get(rank):
        return False
    return other[1] == stage + 1 if stage >= 0 else other[0] != rank


def _stale(
    data: StepData,
    contributions: Contributions,
    place: Place,
    ends: list[StageGradient],
    left: dict[Slot, list[tuple[Place, StageGradient]]],
) -> Stale | None:
    """What entered as the sum of what left another stage in this microbatch and in earlier ones."""
    own = [other for other, _ in left[place[2]] if _may_hand_over(contributions, other, place)]
    if len(ends) != 1 or len(set(own)) != 1:
        return None
    (end,), (rank, stage, slot) = ends, own[0]
    mine = next(sent for other, sent in left[slot] if other == own[0])
    sent = [
        (at, one)
        for at, of_slot in left.items()
        for other, one in of_slot
        if other[:2] == (rank, stage) and one.shape == end.shape and one.seq <= mine.seq
    ]
    sent.sort(key=lambda pair: pair[1].seq)
    sent = sent[-MAX_PARTS:]
    values = [np.frombuffer(one.values, dtype="<f4").astype(float) for one in (end, *(one for _, one in sent))]
    if len(sent) < 2 or sent[-1][0] != slot or len({len(one) for one in values}) > 1:
        return None
    arrived, parts = values[0], np.stack(values[1:], axis=1)
    told = (parts != 0).any(axis=1)
    if told.sum() < MIN_ELEMENTS + 2 * len(sent) or not np.isfinite(parts).all() or not np.isfinite(arrived).all():
        return None
    weights, _, rank_of, _ = np.linalg.lstsq(parts, arrived, rcond=None)
    residual = float(np.linalg.norm(arrived - parts @ weights)) / max(float(np.linalg.norm(arrived)), 1e-300)
    most = max(STALE_RESIDUAL, STALE_SPACINGS * EPSILON.get(end.dtype, 0.0))
    if rank_of < len(sent) or residual > most or abs(weights[-1]) < LEAST_PART:
        return None
    found = [(at, float(weight)) for (at, _), weight in zip(sent, weights, strict=True) if abs(weight) >= LEAST_PART]
    return Stale(place, tuple(found), rank, _backward(data, own[0])) if len(found) > 1 else None


def _as_much(one: Hop, other: Hop) -> bool:
    """Whether two gradients were scaled by one factor: a few elements tell no more than that they were, too."""
    return abs(one.factor - other.factor) <= max(UNTOUCHED, SIGMAS * (one.noise + other.noise)) * abs(other.factor)


def multiple(entered: StageGradient, left: StageGradient, least: int = MIN_ELEMENTS) -> tuple[float, float] | None:
    """(factor, its relative standard error) by which one gradient is the other; None where it is no multiple."""
    if entered.shape != left.shape or len(entered.values) % 4 or len(left.values) % 4:
        return None
    arrived, sent = (np.frombuffer(end.values, dtype="<f4").astype(float) for end in (entered, left))
    if len(arrived) != len(sent) or not (np.isfinite(arrived).all() and np.isfinite(sent).all()):
        return None
    num = int(np.count_nonzero(sent))
    if num < least or not arrived.any():
        return None
    factor = float(arrived @ sent / (sent @ sent))
    residual = float(np.linalg.norm(arrived - factor * sent) / np.linalg.norm(arrived))
    if residual > RESIDUAL:
        return None
    return factor, max(residual, ROUNDING * EPSILON["float32"]) / num**0.5


def _backward(data: StepData, place: Place) -> Event | None:
    rank = place[0]
    for event in data.events[rank]:
        if isinstance(event, Backward) and _place(rank, event) == place:
            return event
    return None

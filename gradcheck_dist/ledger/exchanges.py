"""What ranks did to activations together in forward, and whether what came back is the transpose of that.

A function that combines the ranks' activations is linear in them, and what it is shows in recorded elements: the sum
over ranks, one part from each of them, a part of what each holds, or a part for each. Its backward owes each rank the
gradient of all that depends on its input. Where ranks hold one output alike, what arrives there is either the whole
gradient, alike on all ranks, or each rank's summand of it; the gradient is the one or the sum of the others (f and g
of Megatron-LM, arXiv 1909.08053, section 3). Where each holds a part of its own there is nothing to choose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gradcheck_dist.events import (
    HANDED_ON,
    HANDED_ON_SUMMED,
    OF_SHARDS,
    OF_SUMMANDS,
    SAID_ALIKE,
    SAID_SUMMANDS,
    SENT,
    Event,
    Exchange,
)
from gradcheck_dist.ledger.exchange_masks import is_mask, kept_apart, of_what_is_kept
from gradcheck_dist.ledger.exchange_parts import APART as APART
from gradcheck_dist.ledger.exchange_parts import (
    Parts,
    are_alike,
    are_apart,
    are_near,
    as_one,
    could_be_one,
    flat,
    nearness,
    total_of,
)

OTHERWISE = 0.2
"""Share of a gradient that is not explained from which it is another one, and no rounded or compressed one."""

SUM, COPY, GATHER, SCATTER, SLICE, SWAP = "sum", "copy", "gather", "reduce-scatter", "slice", "all-to-all"
MASK = "mask"
"""Each rank keeps some elements of what all hold alike, with zeros in place of the others: slots of its own experts."""
OWN = "own"
"""Each rank goes on with its own input, which differs from the others'."""
OWN_PART = "own part"
"""Each rank goes on with its own part of its input, and the inputs differ: nothing of the other parts goes on."""
MOVE = "move"
"""Each tensor that a rank gets is one of another rank: a ring's neighbours."""

_GATHERS = ("all_gather_single",)
"""The collectives of functions whose result is on its way when they return, and then known by its shape."""

_DECLARED = (HANDED_ON, HANDED_ON_SUMMED, OF_SHARDS, OF_SUMMANDS, SAID_ALIKE, SAID_SUMMANDS)


@dataclass(frozen=True)
class Passed:
    """An exchange on all ranks of its group, and what its backward did.

    `outcome`: "right"; "own" (each rank got what its own output asks for, though the outputs are alike and their
    gradients are summands), "kept" (a gather without a gradient but for the own part), "scaled" (by `factor`), "lost"
    (nothing came), "mixed" (others' gradients came, of whom forward took nothing), "unlike" (what ranks hand on as
    copies are none), "other". `whole`: what arrived was alike on all ranks. `handed_on`: what was given is what
    arrived, though forward moved it to other ranks.
    """

    events: Mapping[int, Exchange]
    forward: str
    outcome: str
    factor: float = 1.0
    whole: bool = False
    handed_on: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.events))

    @property
    def first(self) -> Exchange:
        return self.events[self.ranks[0]]


def passed(events: Mapping[int, list[Event]]) -> Iterator[Passed]:
    """The exchanges of a step that all ranks of their group recorded, as far as forward could be recognised."""
    for of_group in matched(events):
        one = _judge(of_group)
        if one is not None:
            yield one


def matched(events: Mapping[int, list[Event]]) -> Iterator[dict[int, Exchange]]:
    """The exchanges that all ranks of their group recorded, by rank."""
    found: dict[tuple[object, ...], dict[int, Exchange]] = defaultdict(dict)
    for rank, of_rank in events.items():
        for event in of_rank:
            if isinstance(event, Exchange):
                place = (event.group, event.accumulation_step, event.microbatch, event.index, event.function)
                found[place][rank] = event
    for of_group in found.values():
        first = next(iter(of_group.values()))
        if set(of_group) == set(first.group):
            yield {rank: of_group[rank] for rank in first.group}


def _judge(events: dict[int, Exchange]) -> Passed | None:
    if all(event.put_back for event in events.values()):
        return Passed(events, GATHER, "kept")
    if all(event.operation in _DECLARED for event in events.values()):
        return _declared(events)
    if all(event.operation for event in events.values()):
        return _documented(events)
    read = {rank: sides_of(event) for rank, event in events.items()}
    if any(one is None for one in read.values()):
        return None
    given, made, arrived, back = ({rank: one[i] for rank, one in read.items() if one} for i in range(4))
    near = nearness(next(iter(events.values())).dtype)
    if all(np.isnan(flat({0: parts})).all() for parts in made.values()):
        forward = _unread(events, given, near)
    elif any(event.collectives == (SENT,) for event in events.values()):
        given, back = _without_twins(given, back, near)
        forward = (MOVE, 1.0) if _sources(given, made, near) else None
    else:
        communicated = any(event.collectives for event in events.values())
        if not communicated and (counted := _counted_again(events, given, made, arrived, back, near)):
            return counted
        forward = _forward(given, made, near, communicated)
        if forward is None and could_be_one(given, made):
            given, made, arrived, back = map(as_one, (given, made, arrived, back))
            forward = _forward(given, made, near, communicated)
    if forward is None:
        return None
    kind, scale = forward
    if kind in (OWN, OWN_PART):
        return None if kind == OWN and kept_apart(given, arrived, back) else _mixed(events, kind, arrived, back, near)
    if kind == MASK:
        arrived, back = of_what_is_kept(given, made, arrived, back)
    whole = are_alike(arrived, near)
    if kind in (SUM, COPY, GATHER) and not whole and not are_apart(arrived):
        return None
    if kind == MOVE:
        expected = _sent_back(given, arrived, _sources(given, made, near))
    else:
        expected = _transposed(kind, scale, arrived, summed=not whole)
    want, have = flat(expected), flat(back)
    if want.shape != have.shape or not np.isfinite(want).all() or not np.isfinite(have).all() or not want.any():
        return None
    if not have.any():
        return Passed(events, kind, "lost", 0.0, whole)
    factor = float(want @ have / (want @ want))
    rest = float(np.linalg.norm(have - factor * want) / np.linalg.norm(have))
    if rest <= near:
        right = abs(factor - 1) <= max(near, 1e-3)
        return Passed(events, kind, "right" if right else "scaled", 1.0 if right else factor, whole)
    if kind in (SUM, COPY, GATHER) and not whole:
        own = flat(_transposed(kind, scale, arrived, summed=False))
        if np.linalg.norm(have - own) <= near * np.linalg.norm(have):
            return Passed(events, kind, "own", whole=False)
    if rest < OTHERWISE:
        return None
    same = flat(arrived)
    return Passed(events, kind, "other", whole=whole, handed_on=same.shape == have.shape and bool(np.all(same == have)))


def _declared(events: dict[int, Exchange]) -> Passed | None:
    """Copies that go on as plain tensors: what arrives is handed on as one gradient, or as summands of it; or copies
    and summands that come from plain ones."""
    operation = next(iter(events.values())).operation
    read = given_and_arrived(events)
    if read is None:
        return None
    given, arrived, near = read
    if operation in (SAID_ALIKE, SAID_SUMMANDS):
        unlike = Passed(events, OWN, "unlike") if operation == SAID_ALIKE else Passed(events, SUM, "right")
        return unlike if are_apart(given) else None
    if not are_alike(given, near):
        return None
    whole = are_alike(arrived, near) and bool(flat(arrived).any())
    if not whole and not are_apart(arrived):
        return None
    if operation in (OF_SHARDS, OF_SUMMANDS) and not whole and not _wanted_by_several(arrived):
        return None
    if (operation == HANDED_ON_SUMMED) == whole:
        return Passed(events, COPY, "scaled", float(len(events)), whole=True) if whole else Passed(events, COPY, "own")
    return Passed(events, GATHER if operation == OF_SHARDS else COPY, "right", whole=whole)


def _wanted_by_several(arrived: Parts) -> bool:
    """Whether a gradient arrived at one element on more than one rank: else each may want its own part alone."""
    wanted = np.array([flat({rank: parts}) != 0 for rank, parts in arrived.items()])
    return bool((wanted.sum(axis=0) > 1).any())


def given_and_arrived(events: Mapping[int, Exchange]) -> tuple[Parts, Parts, float] | None:
    """Inputs, the gradients that arrived, and within what they are alike."""
    given, arrived = {}, {}
    for rank, event in events.items():
        sides = _parts(event, (event.input_counts, event.output_counts)) if event.operation else sides_of(event)
        if sides is None:
            return None
        given[rank], arrived[rank] = sides[0], sides[1 if event.operation else 2]
    return given, arrived, nearness(next(iter(events.values())).dtype)


def _documented(events: dict[int, Exchange]) -> Passed | None:
    """A functional collective of torch's: its backward sums over the ranks where outputs are alike, which is one sum
    too many for a gradient that is whole on each of them. An all-to-all exchanges back."""
    first = next(iter(events.values()))
    read = given_and_arrived(events)
    if read is None:
        return None
    if first.operation == SWAP:
        return Passed(events, SWAP, "right")
    given, arrived, near = read
    if are_alike(given, near):
        return None
    whole = are_alike(arrived, near) and bool(flat(arrived).any())
    if first.operation == SCATTER or (not whole and are_apart(arrived)):
        return Passed(events, first.operation, "right")
    return Passed(events, first.operation, "scaled", float(len(events)), whole=True) if whole else None


def _mixed(events: dict[int, Exchange], kind: str, arrived: Parts, back: Parts, near: float) -> Passed | None:
    """What came back where forward handed each rank's own input on, or a part of it: the sum or mean over all ranks, or
    all ranks' parts, is no gradient of that. What else it may be (a clip by a norm over ranks) is meant."""
    if kind == OWN:
        others = {rank: [total_of(arrived, 0)] for rank in arrived}
    else:
        others = {rank: [arrived[one][0] for one in arrived] for rank in arrived}
    found = _multiple(kind, back, others, near) if are_apart(arrived) and flat(back).any() else None
    size = len(events)
    if found is None or all(abs(found[1] * number - 1) > max(near, 1e-3) for number in (1, size)):
        return None
    return Passed(events, kind, "mixed", found[1])


def _counted_again(
    events: dict[int, Exchange], given: Parts, made: Parts, arrived: Parts, back: Parts, near: float
) -> Passed | None:
    """A function of each rank's own input that communicates in backward alone, and gives all ranks' sum of what arrived
    whole on each of them."""
    if not (are_apart(given) and are_apart(made) and are_alike(arrived, near) and flat(arrived).any()):
        return None
    size = len(events)
    if size < 2 or not are_near(back, {rank: [size * part for part in parts] for rank, parts in arrived.items()}, near):
        return None
    return Passed(events, OWN, "scaled", float(size), whole=True)


def sides_of(event: Exchange) -> tuple[list[np.ndarray], ...] | None:
    """Input, output, the gradient that arrived and the one that was given, each as parts."""
    return _parts(event, (event.input_counts, event.output_counts, event.output_counts, event.input_counts))


def _parts(event: Exchange, counts: tuple[tuple[int, ...], ...]) -> tuple[list[np.ndarray], ...] | None:
    values = np.frombuffer(event.values, np.float32).astype(np.float64)
    if len(values) != sum(map(sum, counts)):
        return None
    found, start = [], 0
    for of_one in counts:
        ends = start + np.cumsum((0, *of_one))
        found.append([values[low:high] for low, high in pairwise(ends)])
        start = int(ends[-1])
    return tuple(found)


def _forward(given: Parts, made: Parts, near: float, communicated: bool) -> tuple[str, float] | None:
    """What a function does in forward, and by what it multiplies; None where it is nothing of these, or more than one:
    what is alike on all ranks tells a sum from a copy no more."""
    ranks = list(given)
    parts = {len(given[rank]) for rank in ranks}, {len(made[rank]) for rank in ranks}
    if len(parts[0]) > 1 or len(parts[1]) > 1:
        return None
    alike = are_alike(given, near)
    match parts[0].pop(), parts[1].pop():
        case 1, 1:
            if not communicated:
                if not are_near(made, given, near):
                    return (MASK, 1.0) if alike and is_mask(given, made) else None
                return (COPY, 1.0) if alike else (OWN, 1.0) if are_apart(given) else None
            total = {rank: [total_of(given, 0)] for rank in ranks}
            return None if alike else _multiple(SUM, made, total, near)
        case 1, _:
            together = {rank: [given[one][0] for one in ranks] for rank in ranks}
            return (GATHER, 1.0) if not alike and are_near(made, together, near) else None
        case _, 1:
            own = {rank: [given[rank][place]] for place, rank in enumerate(ranks)}
            if not communicated and are_near(made, own, near):
                return (SLICE, 1.0) if alike else (OWN_PART, 1.0) if are_apart(given) else None
            if alike:
                return None
            total = {rank: [total_of(given, place)] for place, rank in enumerate(ranks)}
            return _multiple(SCATTER, made, total, near)
        case _:
            swapped = {rank: [given[one][place] for one in ranks] for place, rank in enumerate(ranks)}
            return (SWAP, 1.0) if are_near(made, swapped, near) else None


def _unread(events: dict[int, Exchange], given: Parts, near: float) -> tuple[str, float] | None:
    """What a function does in forward whose result nobody had waited for: a gather, or what is not known."""
    known = all(event.collectives == _GATHERS and len(event.output_counts) > 1 for event in events.values())
    return (GATHER, 1.0) if known and not are_alike(given, near) else None


def _transposed(kind: str, scale: float, arrived: Parts, *, summed: bool) -> Parts:
    """What each rank's input is owed. `summed`: what arrived at outputs that are alike are summands."""
    ranks = list(arrived)
    if kind == MASK:
        return {rank: [total_of(arrived, 0)] for rank in ranks}
    if kind in (SUM, COPY):
        if not summed:
            return {rank: [scale * arrived[rank][0]] for rank in ranks}
        return {rank: [scale * total_of(arrived, 0)] for rank in ranks}
    if kind == GATHER:
        if not summed:
            return {rank: [arrived[rank][place]] for place, rank in enumerate(ranks)}
        return {rank: [total_of(arrived, place)] for place, rank in enumerate(ranks)}
    if kind in (SCATTER, SLICE):
        return {rank: [scale * arrived[one][0] for one in ranks] for rank in ranks}
    return {rank: [arrived[one][place] for one in ranks] for place, rank in enumerate(ranks)}


def _without_twins(given: Parts, back: Parts, near: float) -> tuple[Parts, Parts]:
    """A tensor that a rank sends to several neighbours as one, with the sum of what was given for each time."""
    once: Parts = {}
    summed: Parts = {}
    for rank, parts in given.items():
        once[rank], summed[rank] = [], []
        for part, gradient in zip(parts, back[rank], strict=True):
            known = [place for place, one in enumerate(once[rank]) if are_near({0: [part]}, {0: [one]}, near)]
            if known:
                summed[rank][known[0]] = summed[rank][known[0]] + gradient
            else:
                once[rank].append(part)
                summed[rank].append(gradient)
    return once, summed


def _sources(given: Parts, made: Parts, near: float) -> dict[tuple[int, int], tuple[int, int]]:
    """Which rank's which tensor each rank got as which, (rank, place) by (rank, place). Empty unless every tensor that
    was given came out on another rank: one that goes on elsewhere (another function receives it) is owed more."""
    held = {(rank, place): part for rank, parts in given.items() for place, part in enumerate(parts)}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, parts in made.items():
        for place, part in enumerate(parts):
            equal = [of for of, one in held.items() if are_near({0: [part]}, {0: [one]}, near)]
            if len(equal) != 1 or equal[0][0] == rank:
                return {}
            found[rank, place] = equal[0]
    return found if set(found.values()) == set(held) else {}


def _sent_back(given: Parts, arrived: Parts, sources: dict[tuple[int, int], tuple[int, int]]) -> Parts:
    """What each tensor that was given is owed: what arrived wherever it came out."""
    owed = {rank: [np.zeros_like(part) for part in parts] for rank, parts in given.items()}
    for (rank, place), (of, at) in sources.items():
        owed[of][at] += arrived[rank][place]
    return owed


def _multiple(kind: str, made: Parts, total: Parts, near: float) -> tuple[str, float] | None:
    mine, theirs = flat(made), flat(total)
    if mine.shape != theirs.shape or not theirs.any():
        return None
    scale = float(mine @ theirs / (theirs @ theirs))
    return (kind, scale) if scale and np.linalg.norm(mine - scale * theirs) <= near * np.linalg.norm(mine) else None

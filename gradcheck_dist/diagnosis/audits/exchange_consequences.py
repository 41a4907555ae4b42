"""Exchanges that look wrong because another one is, or a function that exchanges nothing and should.

Behind a sum that backward lacks, the gradients of one loss differ between ranks everywhere, and a function that rightly
hands copies on looks as if it lacked a sum itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradcheck_dist.diagnosis.audits.exchanges import Faulty
from gradcheck_dist.events import Exchange
from gradcheck_dist.ledger.exchange_parts import are_alike, are_apart, are_near, nearness
from gradcheck_dist.ledger.exchanges import COPY, Passed, passed, sides_of
from gradcheck_dist.ledger.tracks import StepData

Place = tuple[object, ...]
"""Faulty.place"""
Slot = tuple[tuple[int, ...], int, int]
"""The ranks of an exchange, its accumulation step and microbatch."""


def consequences(data: StepData, alike: Mapping[Place, Sequence[Faulty]]) -> dict[Place, list[Place]]:
    """For each place whose backward lacks a sum, those that follow from it: they did right by what was alike, and are
    wrong in what backward reached behind that place alone. Behind a function that hands copies on, and whose ranks go
    on differently, sums and gathers that hand on what arrives need not have met anything alike.

    Args:
        alike: the faults of a step by their place.
    """
    right: dict[Place, dict[Slot, int]] = defaultdict(dict)
    for one in passed(data.events):
        if one.outcome == "right" and one.whole:
            _first(right[Faulty(one, shared=True).written], one)
    wrong: dict[Place, dict[Slot, int]] = defaultdict(dict)
    for place, of_place in alike.items():
        for fault in of_place:
            if fault.passed.outcome == "own" and fault.shared:
                _first(wrong[place], fault.passed)
    found: dict[Place, list[Place]] = defaultdict(list)
    for place, mine in wrong.items():
        well = right[alike[place][0].written]
        sources = [
            other
            for other, theirs in wrong.items()
            if all(well.get(slot, seq) < theirs.get(slot, seq) < seq for slot, seq in mine.items())
            or (
                not well
                and alike[other][0].passed.forward == COPY != alike[place][0].passed.forward
                and all(theirs.get(slot, seq) < seq for slot, seq in mine.items())
            )
        ]
        if sources:
            found[min(sources, key=lambda other: min(wrong[other].values()))].append(place)
    return dict(found)


def _first(of_place: dict[Slot, int], one: Passed) -> None:
    """Remember when backward first reached a place in each pass."""
    slot = (one.ranks, one.first.accumulation_step, one.first.microbatch)
    of_place[slot] = min(one.first.seq, of_place.get(slot, one.first.seq))


def unsummed(data: StepData, ranks: Sequence[int]) -> Exchange | None:
    """A function that hands its input on, and what arrives there back, on each rank alone, where the inputs are copies
    and these gradients differ: that of a column-parallel layer whose backward forgot its sum does so."""
    alone: dict[tuple[object, ...], dict[int, Exchange]] = defaultdict(dict)
    for rank in ranks:
        for event in data.events.get(rank, ()):
            if isinstance(event, Exchange) and event.group == (rank,) and event.defined_at and not event.operation:
                slot = (event.function, event.index, event.accumulation_step, event.microbatch)
                alone[slot][rank] = event
    for by_rank in alone.values():
        sides = {rank: one for rank, event in by_rank.items() if (one := sides_of(event)) is not None}
        if len(sides) < max(2, len(ranks)):
            continue
        given, made, arrived, back = ({rank: one[at] for rank, one in sides.items()} for at in range(4))
        near = nearness(next(iter(by_rank.values())).dtype)
        as_it_is = are_near(made, given, near) and are_near(back, arrived, near)
        if as_it_is and are_alike(given, near) and are_apart(arrived):
            return by_rank[min(by_rank)]
    return None

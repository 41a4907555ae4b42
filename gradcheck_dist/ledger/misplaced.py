"""Gradients that another stage sent for other activations than those that they were handed to.

Gradients that are exchanged between two tensors of one microbatch, or between microbatches, are still what left another
stage, each of them once, so nothing is missing. What was sent forward tells: an output and what the other stage was
given for it hold the same values, and their gradients have to be the same, times one number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gradcheck_dist.events import Event, StageGradient
from gradcheck_dist.ledger.solve import EPSILON

MIN_ELEMENTS = 8
ALIKE = 4 * EPSILON["bfloat16"]
"""Activations may be rounded to any type on the way: so far off, relative to their norm, they are the same."""

Place = tuple[int, int, tuple[int, int]]
Ends = Sequence[tuple[Place, StageGradient]]
MayHandOver = Callable[[Place, Place], bool]
Multiple = Callable[[StageGradient, StageGradient], object]


class Misplaced(NamedTuple):
    """A pass in which an output got the gradient that was `sent` for other activations; None where it got none. `own`
    is from where that was sent which belongs to it, `entered` its backward pass."""

    place: Place
    own: Place
    sent: Place | None
    entered: Event | None = None


def misplaced(
    entered: Mapping[Place, Sequence[StageGradient]],
    sent: Ends,
    known: Container[Place],
    may_hand_over: MayHandOver,
    multiple: Multiple,
) -> list[Misplaced]:
    """The passes in which an output got another's gradient, or none, though another stage sent one for what it was
    given of this output. `sent`: all that left stages, `known`: passes of which something else is told."""
    found: list[Misplaced] = []
    for place, ends in entered.items():
        if place in known:
            continue
        near = [(at, one) for at, one in sent if may_hand_over(at, place)]
        others = [
            Misplaced(place, own, at)
            for end in ends
            if (own := _own(end, near, multiple)) is not None
            for at in _given(end, near, multiple)
        ]
        found += sorted(others, key=lambda one: one.sent is None)[:1]
    return sorted(found, key=lambda one: one.place)


def _own(end: StageGradient, sent: Ends, multiple: Multiple) -> Place | None:
    """From where a gradient left for what an output is, by its values; None where the output got one of such."""
    own = [(at, one) for at, one in sent if same_forward(end, one)]
    if not own or not all(_num_told(one.values) >= MIN_ELEMENTS for _, one in own):
        return None
    return None if any(multiple(end, one) is not None for _, one in own) else own[0][0]


def _given(end: StageGradient, sent: Ends, multiple: Multiple) -> Iterator[Place | None]:
    """From where the gradient of an output came: None for nowhere, where it is zero."""
    if not _num_told(end.values):
        yield None
    yield from (at for at, one in sent if multiple(end, one) is not None)


def unused(entered: Mapping[Place, Sequence[StageGradient]], sent: Ends, sources: Mapping[Place, Place]) -> list[Place]:
    """The passes that sent a gradient which nobody differentiates, of the shape of one that the stage before does, in
    every pass of theirs: what a stage makes for an activation that came beside another."""
    of_pass: dict[Place, list[StageGradient]] = defaultdict(list)
    for at, one in sent:
        of_pass[at].append(one)
    used: dict[Place, int] = defaultdict(int)
    for place, source in sources.items():
        used[source] = max(used[source], sum(_num_told(end.values) > 0 for end in entered[place]))
    told = {at: _alike_by_shape(ones) for at, ones in of_pass.items() if at in used}
    lacking = [at for at, num in told.items() if num > used[at]]
    return sorted(lacking) if lacking and len(lacking) == len(told) == len(of_pass) else []


def _alike_by_shape(ends: Sequence[StageGradient]) -> int:
    """How many gradients have the commonest shape, where all ends of a pass have it; of others nothing is asked."""
    told = [end for end in ends if _num_told(end.values) >= MIN_ELEMENTS]
    return len(told) if len({end.shape for end in told}) == 1 else 0


def same_forward(end: StageGradient, other: StageGradient) -> bool:
    """Whether what was sent is what was given, by some of its elements, but for rounding."""
    if end.shape != other.shape or not end.forward or len(end.forward) != len(other.forward):
        return False
    one, two = (np.frombuffer(values, dtype="<f4").astype(float) for values in (end.forward, other.forward))
    if not (np.isfinite(one).all() and np.isfinite(two).all()) or len(np.unique(one)) < MIN_ELEMENTS:
        return False
    return bool(np.linalg.norm(one - two) <= ALIKE * np.linalg.norm(one))


def _num_told(values: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(values, dtype="<f4")))


def slots(places: Sequence[Place], most: int) -> Iterator[str]:
    """Passes in words."""
    for _, _, (k, m) in places[:most]:
        yield f"(accumulation step {k}, microbatch {m})"
    if len(places) > most:
        yield f"{len(places) - most} more"

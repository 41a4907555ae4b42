"""Sums that a line of the trainer's divides by the ranks which they add up: an average, made by two hands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.weights.cells import SIGMAS
from gradcheck_dist.events import Event, Reduce

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.causes.account import Account, Along, Gap, Step

MOST_SUMS = 3
"""Over so many groups a gradient is summed one after the other, at most: as many dimensions a mesh has for its data."""


def ask_for_average(result: Account) -> None:
    """A communication hook of the trainer's that sums and does something else besides: where it divides by the ranks it
    sums over, it averages. Behind losses that are multiplied by these ranks, which ask it for an average, only what it
    does beyond that is unasked."""
    for place, step in enumerate(result.steps):
        event = step.event
        if not isinstance(event, Reduce) or event.hook is None or event.op != "sum" or event.impl != "ddp":
            continue
        size = event.num_ranks
        own = max((i for i, gap in enumerate(result.gaps) if gap.end is event), default=None)  # behind it
        if size < 2 or own is None or abs(result.gaps[own].factor - 1) <= SAME:
            continue
        gap = result.gaps[own]
        if _undoes(gap, size) or abs(result.root / size - 1) <= SAME:
            result.steps[place] = replace(step, factor=step.factor / size)
            result.gaps[own] = replace(gap, factor=gap.factor * size)


def average_again(result: Account, arrivals: Sequence[int]) -> None:
    """Gradients that are summed and divided by hand in every pass: behind a sum, over one group of ranks or several, a
    line divides what the same sums add up again. Such a round is an average of what the ranks hold alike, which leaves
    it as it is. `arrivals`: the sequence numbers at which passes brought gradients. Where none came in between, and no
    line divides behind the last sum, it sums an average once more."""
    rounds: dict[Along, Set[Along]] = {}  # the sums of a pass up to each one
    latest: dict[Along, int] = {}
    for place in (place for place, step in enumerate(result.steps) if isinstance(step.event, Reduce)):
        along = result.steps[place].along
        if along in rounds:
            _take_out(result, latest[along], place, rounds[along], arrivals)
        else:
            rounds[along] = {*rounds, along}
        latest[along] = place


def _take_out(result: Account, first: int, last: int, sums: Set[Along], arrivals: Sequence[int]) -> None:
    """Set to 1 what `sums` did behind the first of two like reductions and up to the last, and take it from the
    division in between; nothing where none divides by it."""
    earlier, later = result.steps[first].event, result.steps[last].event
    met = [place for place in range(first + 1, last + 1) if isinstance(result.steps[place].event, Reduce)]
    summed = [place for place in met if result.steps[place].along in sums]
    between = _between(result.gaps, earlier, later)
    # A root's reduction adds up again what a broadcast brought to the others, which nobody recorded.
    inside = [place for place in between if result.gaps[place].start is result.gaps[place].end]
    changed = [place for place in between if place not in inside and abs(result.gaps[place].factor - 1) > SAME]
    times = prod(result.steps[place].factor for place in summed) * prod(result.gaps[place].factor for place in inside)
    matches = _divides if len(changed) == 1 and summed == met else _undoes
    divided = next((place for place in changed if matches(result.gaps[place], times)), None)
    if divided is None or times <= 1 + SAME:
        return
    if not any(earlier.seq < seq < later.seq for seq in arrivals) and not any(
        _divides(gap, times) for gap in result.gaps[between.stop :]
    ):
        return
    result.gaps[divided] = replace(result.gaps[divided], factor=result.gaps[divided].factor * times)
    for place in summed:
        result.steps[place] = replace(result.steps[place], factor=1.0)
    for place in inside:
        result.gaps[place] = replace(result.gaps[place], factor=1.0)


def _divides(gap: Gap, factor: float) -> bool:
    """Whether a factor is divided out in a gap that divides by a whole number besides, which is the gap's own."""
    left = abs(gap.factor * factor)
    return 0 < left <= 1 + SAME and abs(left * round(1 / left) - 1) <= max(SAME, SIGMAS * gap.noise)


def _undoes(gap: Gap, factor: float) -> bool:
    return abs(gap.factor * factor - 1) <= max(SAME, SIGMAS * gap.noise)


def _between(gaps: Sequence[Gap], earlier: Event, later: Event) -> range:
    """The places of the gaps behind one event and in front of another."""
    first = next((place for place, gap in enumerate(gaps) if gap.start is earlier and gap.end is not earlier), None)
    last = next((place for place, gap in enumerate(gaps) if gap.end is later), None)
    return range(0) if first is None or last is None else range(first, last + 1)


def summed_ranks(steps: Iterable[Step]) -> set[int]:
    """How many ranks' gradients recorded reductions add up, one by one or one after the other."""
    events = {step.along: step.event for step in steps}
    sums = [event.num_ranks for event in events.values() if isinstance(event, Reduce) and event.op == "sum"]
    return {prod(some) for count in range(1, MOST_SUMS + 1) for some in combinations(sums, count)}


def divides_by(factors: Sequence[float], ranks: int) -> bool:
    """Whether each time it acts a line divides by so many ranks: with a sum over them it is the average."""
    return all(abs(factor * ranks - 1) <= SAME for factor in factors)

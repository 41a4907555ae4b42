"""Gradients that backward made whole on each of several ranks, where others' are the ranks' own parts of one sum.

Ranks that part a grid, a graph or a sequence have each the loss of their own part. What stands in front of the place
where all parted what they hold alike (a trained feature of each node) may get the gradient of all parts on every rank,
by a gather in backward: it is the same there, though the losses differ. Summed over the ranks it counts as often as
there are ranks, and averaged once; where the gather divides by the ranks it is the other way round. Where nobody
reduces it at all (a recurrent layer that every rank computes on the whole sequence), no reduction may be missing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gradcheck_dist.diagnosis.audits.exchanges import are_parts
from gradcheck_dist.diagnosis.audits.whole_shares import UNDOES
from gradcheck_dist.diagnosis.causes.alone import is_alone
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Exchange, Reduce
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.exchanges import COPY, SLICE, SUM, Passed, passed
from gradcheck_dist.ledger.repeated_batches import reduced_over, same_gradients
from gradcheck_dist.ledger.strangers import OTHER_LOSS, copies, loss_values
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track
from gradcheck_dist.wording import numbered

WHOLE_ON_EACH = "one process's gradient of it tells"
"""What the next step is chosen by. Central differences say nothing of hooks by which such a trainer makes up for it."""


class Whole(NamedTuple):
    """Ranks with tokens of their own that exchange activations, and parameters that all of them reduce, whose gradient
    is the same on each in every pass. Others' differ."""

    ranks: tuple[int, ...]
    params: frozenset[ParamKey]

    @property
    def words(self) -> str:
        names = in_short(sorted({name for _, name in self.params}))
        return (
            f"the gradient of {names} is the same on {numbered('rank', self.ranks)}, which have losses of their own, "
            "and other parameters' gradients are not: backward combined all ranks' parts of it"
        )


def whole_is_counted_once(case: Case, data: StepData) -> str | None:
    """Why a factor accuses nobody: it counts once what is whole on each rank."""
    for one in _found(data, case.context.contributions):
        times = 1 / len(one.ranks)
        near = max(UNDOES, case.pattern.tolerance)
        once = all(abs(cell.ratio / times - 1) <= near for held in case.held for cell in held.cells)
        if once and all(held.cells and held.param in one.params for held in case.held):
            return f"{one.words}. x {times:.6g} is right if that was their sum, which counts once then; {WHOLE_ON_EACH}"
    return None


def leave_whole_open(cases: Iterable[Case], data: StepData) -> tuple[list[Case], list[str]]:
    """The cases without the gradients that lack a reduction and are whole on each rank, and why these are left open."""
    left: list[Case] = []
    names: dict[tuple[tuple[int, ...], str], set[str]] = defaultdict(set)
    for case in cases:
        lacking = case.culprit.absent or is_alone(case.event)
        found = _whole_on(case, data) if lacking else {}
        for key, ranks in found.items():
            without = "over them" if any(len(group) > 1 for group in _reduced_over(data, key)) else ""
            names[ranks, without].add(key[1])
        if (rest := case.without(found)) is not None:
            left.append(rest)
    return left, [
        f"the gradient of {in_short(sorted(of_ranks))} is the same on {numbered('rank', ranks)} without any reduction"
        f"{f' {without}' if without else ''}, "
        "and these have losses of their own: backward combined all ranks' parts of it. Nothing is missing if that was "
        f"their sum, and a factor of {len(ranks)} is if it divided that by the ranks; {WHOLE_ON_EACH}"
        for (ranks, without), of_ranks in names.items()
    ]


def _reduced_over(data: StepData, key: ParamKey) -> set[tuple[int, ...]]:
    """The groups over which a parameter's gradient is reduced."""
    return {
        event.group
        for rank, track in data.tracks.get(key, {}).items()
        for event in data.events[rank]
        if isinstance(event, Reduce) and track.param.id in data.params_of(rank, event.params)
    }


def _whole_on(case: Case, data: StepData) -> dict[ParamKey, tuple[int, ...]]:
    """The parameters of which all ranks that exchange activations, each with a loss of its own, hold copies and got one
    gradient in every pass; and these ranks. Of several groups of them (beside data-parallel ranks) the first, where no
    rank lacks all of one group."""
    place = case.context.contributions.coordinate
    exchanges = list(passed(data.events))
    groups = [
        ranks
        for ranks in sorted({tuple(sorted(one.ranks)) for one in exchanges if len(one.ranks) > 1})
        if len({place.get(rank, rank) for rank in ranks}) == len(ranks)
        and (
            _losses_differ(data, ranks, exchanges)
            or any(one.ranks == ranks and one.forward == SUM for one in exchanges)
        )
    ]
    found: dict[ParamKey, tuple[int, ...]] = {}
    for key in {held.param for held in case.held}:
        of_rank = data.tracks.get(key, {})
        whole = [ranks for ranks in groups if set(ranks) <= of_rank.keys() and _are_alike(of_rank, ranks)]
        told = of_rank.keys() <= {rank for ranks in whole for rank in ranks}
        lacked = [_lacked(held) for held in case.held if held.param == key]
        if told and not any({place.get(rank, rank) for rank in ranks} <= gone for ranks in whole for gone in lacked):
            found[key] = whole[0]
    return found


def _are_alike(of_rank: dict[int, Track], ranks: tuple[int, ...]) -> bool:
    first, *others = ranks
    return all(copies(of_rank, first, other) and same_gradients(of_rank[first], of_rank[other]) for other in others)


def _lacked(held: Held) -> set[int]:
    """The data ranks of which nothing is in a gradient."""
    return {cell.key[0] for cell in held.cells if abs(cell.ratio) <= max(cell.margin, UNDOES)}


def whole_for_each(data: StepData, contributions: Contributions) -> list[str]:
    """Why a step is left open whose weights are right as if each rank had its own part of every gradient."""
    found = list(passed(data.events))
    divided = {
        one.ranks
        for one in found
        if one.forward in (SLICE, COPY) and one.outcome == "scaled" and abs(one.factor * len(one.ranks) - 1) <= UNDOES
    }
    return [
        f"{one.words}. It counts {len(one.ranks)} times if that was their sum, and once if backward divided that by "
        f"the ranks; {WHOLE_ON_EACH}"
        for one in _found(data, contributions)
        if one.ranks not in divided and _losses_differ(data, one.ranks, found)
    ]


def _found(data: StepData, contributions: Contributions) -> Iterator[Whole]:
    groups = {
        tuple(sorted(event.group))
        for events in data.events.values()
        for event in events
        if isinstance(event, Exchange) and len(event.group) > 1
    }
    for ranks in sorted(groups):
        if not set(ranks) <= data.events.keys():
            continue
        if len({contributions.coordinate.get(rank, rank) for rank in ranks}) < len(ranks):
            continue  # what ranks of one batch hold is told apart where weights are laid beside one another
        first, *others = ranks
        reduced = set.intersection(*(reduced_over(data, first, other) for other in others))
        held = {
            key: of_rank
            for key, of_rank in data.tracks.items()
            if all(copies(of_rank, first, other) for other in others) and of_rank[first].param.id in reduced
        }
        alike = {
            key
            for key, of_rank in held.items()
            if all(same_gradients(of_rank[first], of_rank[other]) for other in others)
        }
        apart = [key for key, of_rank in held.items() if key not in alike and are_parts(of_rank, ranks)]
        if alike and apart:
            yield Whole(ranks, frozenset(alike))


def _losses_differ(data: StepData, ranks: tuple[int, ...], found: Iterable[Passed]) -> bool:
    """Whether the ranks' losses have values of their own, or a sum over the ranks gave them one value: else each may
    compute one loss whole, behind all that they exchange."""
    if any(one.ranks == ranks and one.forward == SUM and one.first.input_counts == (1,) for one in found):
        return True
    first, *others = (loss_values(data, rank) for rank in ranks)
    return any(
        abs(mine - theirs) > OTHER_LOSS * max(abs(mine), abs(theirs))
        for other in others
        for slot in first.keys() & other.keys()
        for mine, theirs in zip(first[slot], other[slot], strict=False)
    )

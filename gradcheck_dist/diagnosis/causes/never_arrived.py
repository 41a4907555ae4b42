"""Contributions of other ranks that never came to a gradient, and what the missing reduction leaves of those that did.

A reduction that averages would have taken a part of what is there: R-fold weights beside other ranks' that are gone are
one fault. What is off besides is another one, so the missing hand's own number is taken out before the rest is judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, prod

from gradcheck_dist.diagnosis.causes.account import Account, Step, event_at
from gradcheck_dist.diagnosis.causes.culprit import Culprit, culprit_of_gap, last_backward
from gradcheck_dist.diagnosis.causes.hands import FAINT, Judged
from gradcheck_dist.diagnosis.weights.cells import Cell
from gradcheck_dist.diagnosis.weights.factors import name_number
from gradcheck_dist.events import Backward, Event, Reduce
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import StepData

NAMELESS = 10.0
"""What a number costs that is no product of degrees and counts; names cost less."""
LEAST, MOST = 1e-3, 0.02
"""Relative: how near to right a loss's weight must be, and how near at the roughest."""
Slot = tuple[int, tuple[int, int]]
"""A gradient on a rank, and (accumulation step, microbatch)."""


@dataclass
class Half:
    """A weight that is judged without what a missing reduction leaves in it: `left`, by `culprit`. `cell` and `account`
    are those of the whole."""

    one: Judged
    culprit: Culprit
    left: float
    cell: Cell
    account: Account


def never_arrived(
    data: StepData,
    contributions: Contributions,
    every: Sequence[Judged],
    wrong: list[Judged],
    brought: Sequence[Judged],
    quantities: Mapping[str, float],
) -> tuple[list[Judged], list[Half]]:
    """Give contributions of other ranks that no reduction brought here to what is missing. Returns what is left to be
    explained, and the weights that are judged without what the missing reduction would have taken away.

    Where a reduction that nobody recorded `brought` others, here or to another rank, it is this one that left them out.
    """
    missing: set[Slot] = set()
    for one in wrong:
        if not one.account.arrived and one.gone:
            missing.add(_slot(one))
    place = contributions.coordinate
    missing |= _with_own_alone(place, every, missing)
    summed_alone = _lacking_summands(every, missing)
    unseen, elsewhere = {one.held.rank: one for one in brought}, {one.held.param for one in brought}
    rest, culprits = [], dict[int, Culprit]()
    with_holder: dict[Slot, tuple[Judged, Culprit]] = {}
    with_own = {_slot(one) for one in every if place.get(one.held.rank) == one.cell.key[0]}
    for one in wrong:
        # A rank without tokens in a pass has what its group brought there in the place of its own.
        own = place.get(one.held.rank) == one.cell.key[0] or _slot(one) not in with_own
        if _slot(one) not in missing or (one.account.arrived and not own):
            rest.append(one)
            continue
        if _slot(one) in summed_alone and not one.gone:
            rest.append(one)  # a sum over ranks of one batch would have left it as it is
            continue
        event = last_backward(data, one.held, one.held.rank)
        culprit = Culprit("backward", one.held.rank, event, factor=one.cell.ratio, absent=True)
        if one.held.rank in unseen:
            ends = unseen[one.held.rank].account.gaps[:1]
            before = ends[0].end if ends else None
            culprit = replace(culprit, factor=None, absent=False, unrecorded=True, unheard=True, before=before)
        elif one.held.param in elsewhere and event is not None:
            # It brought others to other ranks, and nothing to this one.
            before = _measured_behind(data, one, event)
            culprit = replace(
                culprit, factor=None, absent=False, unrecorded=True, unheard=True, elsewhere=True, before=before
            )
        one.shares.append((culprit, one.cell.ratio))
        culprits[id(one.held)] = culprit
        if own and not one.gone:
            with_holder[_slot(one)] = one, culprit
    if unseen or elsewhere:
        rest = [one for one in rest if not _came_with_own(one, with_holder)]
    else:
        for one, culprit in _thrown_away(contributions, every, rest):
            missing.add(_slot(one))
            culprits[id(one.held)] = culprit
            one.shares.append((culprit, one.cell.ratio))
        rest = [one for one in rest if not one.shares]
    halves = [] if unseen or elsewhere else _halves(contributions, every, missing, culprits, quantities)
    parted = {id(half.one) for half in halves}
    rest = [one for one in rest if id(one) not in parted]
    for one in rest:
        if one.like is not None and id(one.like) in parted:
            one.like = None
    rest += [half.one for half in halves if not half.one.cell.right]
    return _instead(data, rest), halves


def _came_with_own(one: Judged, own: Mapping[Slot, tuple[Judged, Culprit]]) -> bool:
    """Whether what another rank's contribution weighs is what the holder's own does, where those of others are missing:
    one reduction brought it, and the next one did not come. Then the same is to blame."""
    if one.gone or _slot(one) not in own:
        return False
    other, culprit = own[_slot(one)]
    if abs(one.cell.ratio - other.cell.ratio) > one.cell.margin + other.cell.margin:
        return False
    one.shares.append((culprit, one.cell.ratio))
    return True


def put_together(halves: Sequence[Half]) -> None:
    """Make the weights whole again, what the missing reduction left in them being its share."""
    for half in halves:
        half.one.cell, half.one.account = half.cell, half.account
        if half.left != 1:
            half.one.shares.insert(0, (half.culprit, half.left))


def _slot(one: Judged) -> Slot:
    return id(one.held), one.cell.key[1:]


def _with_own_alone(place: Mapping[int, int], every: Sequence[Judged], missing: set[Slot]) -> set[Slot]:
    """The slots in which no rank but the holder has tokens, where others' contributions are missing in all its other
    slots: the reduction that did not come would have taken the same of these."""
    shared: dict[int, set[Slot]] = defaultdict(set)
    for one in every:
        if place.get(one.held.rank) != one.cell.key[0]:
            shared[id(one.held)].add(_slot(one))
    without = {held for held, slots in shared.items() if slots <= missing}
    return {_slot(one) for one in every if id(one.held) in without and _slot(one) not in shared[id(one.held)]}


def _lacking_summands(every: Sequence[Judged], missing: set[Slot]) -> set[Slot]:
    """The slots in which all that is missing are other ranks' summands of contributions of which some came: ranks of
    one batch add these up, and no average is lacking."""
    gone: dict[Slot, set[ContributionKey]] = defaultdict(set)
    came: dict[Slot, set[ContributionKey]] = defaultdict(set)
    for one in every:
        if _slot(one) in missing:
            (gone if one.gone else came)[_slot(one)].add(one.cell.key)
    return {slot for slot, keys in gone.items() if keys <= came[slot]}


def _thrown_away(
    contributions: Contributions, every: Sequence[Judged], wrong: Sequence[Judged]
) -> list[tuple[Judged, Culprit]]:
    """Contributions of other ranks that a recorded reduction brought, and that are not in the gradient behind it, where
    the own ones are as they were: its result was thrown away, as where a communication hook reduces a copy and returns
    what it was given."""
    place = contributions.coordinate
    own_ones = [one for one in every if place.get(one.held.rank) == one.cell.key[0]]
    known = {_slot(one) for one in own_ones}
    changed = {_slot(one) for one in own_ones if one.gone or one.changed_unseen or not one.account.arrived}
    held_changed, held_known = {held for held, _ in changed}, {held for held, _ in known}
    found = []
    for one in wrong:
        own = place.get(one.held.rank) == one.cell.key[0]
        if own or not (one.gone and one.account.arrived) or _slot(one) in changed:
            continue
        if _slot(one) not in known and (id(one.held) in held_changed or id(one.held) not in held_known):
            continue  # of a shard that has nothing of the own batch nobody sees what was done to that
        gap = next((gap for gap in one.account.gaps if abs(gap.factor) < FAINT), None)
        if gap is None or gap.rank != one.held.rank or not isinstance(gap.start, Reduce):
            continue
        found.append((one, culprit_of_gap(gap, one.account)))
    return found


def _halves(
    contributions: Contributions,
    every: Sequence[Judged],
    missing: set[Slot],
    culprits: Mapping[int, Culprit],
    quantities: Mapping[str, float],
) -> list[Half]:
    """The weights that did come to gradients where others are missing, each without what the reduction would take."""
    coordinates: dict[Slot, set[int]] = defaultdict(set)
    there: dict[Slot, list[Judged]] = defaultdict(list)
    for one in every:
        if _slot(one) in missing:
            coordinates[_slot(one)].add(one.cell.key[0])
            if one.account.arrived and not one.gone and one.cell.ratio > 0:
                there[_slot(one)].append(one)
    by_sizes: dict[tuple[float, ...], list[Judged]] = defaultdict(list)
    for slot, found in there.items():
        if sizes := _sizes(contributions, slot[1], coordinates[slot], len({one.cell.key[0] for one in found})):
            by_sizes[sizes] += found
    halves = []
    for sizes, found in by_sizes.items():
        lefts = [left for left in (*sizes, 1.0) if _as_in_other_passes(found, every, missing, left)]
        beside = _divided_beside(found, every, missing)
        left = min(lefts or (*sizes, 1.0), key=lambda left: _cost(found, left, quantities, beside))
        for one in found:
            one.shares.clear()
            halves.append(Half(one, culprits[id(one.held)], left, one.cell, one.account))
            one.cell = _without(one.cell, left)
            one.account = replace(one.account, root=one.account.root / left)
    return halves


def _as_in_other_passes(found: Sequence[Judged], every: Sequence[Judged], missing: set[Slot], left: float) -> bool:
    """Whether recorded reductions of the same gradients in other passes, of which some are there, divide all that they
    bring by `left`: a wrapper that averages in one pass would do so in the next."""
    mine = {id(one.held) for one in found}
    others = [one for one in every if id(one.held) in mine and _slot(one) not in missing and _reductions(one)]
    factors = [prod(step.factor for step in _reductions(one)) for one in others]
    return bool(factors) and all(abs(factor * left - 1) <= LEAST for factor in factors)


def _divided_beside(found: Sequence[Judged], every: Sequence[Judged], missing: set[Slot]) -> float | None:
    """What recorded reductions divide by on the same ranks where they bring to other gradients what is missing in
    these, beyond what they do to both; None where nothing or several numbers tell."""
    mine = {(one.held.rank, one.cell.key[1:]): prod(step.factor for step in _reductions(one)) for one in found}
    gone = {(one.held.rank, one.cell.key) for one in every if _slot(one) in missing and one.gone}
    slots = {_slot(one) for one in found}
    factors = [
        prod(step.factor for step in _reductions(one)) / mine[one.held.rank, one.cell.key[1:]]
        for one in every
        if _slot(one) not in slots
        and (one.held.rank, one.cell.key) in gone
        and one.account.arrived
        and _reductions(one)
        and mine.get((one.held.rank, one.cell.key[1:]))
    ]
    if not factors or not factors[0] or any(abs(factor / factors[0] - 1) > LEAST for factor in factors):
        return None
    return 1 / factors[0]


def _sizes(contributions: Contributions, slot: tuple[int, int], known: set[int], num_arrived: int) -> tuple[float, ...]:
    """Over how many parts the missing reduction would have gone: of ranks whose batch has no token nobody knows on
    which side of it they are."""
    everyone = set(contributions.coordinate.values())
    empty = everyone - {key[0] for key, one in contributions.by_key.items() if key[1:] == slot and one.num_tokens != 0}
    if not empty or known | empty != everyone:
        return (len(known) / num_arrived,) if len(known) > num_arrived else ()
    total, most = len(everyone), num_arrived + len(empty)
    return tuple(total / arrived for arrived in range(num_arrived, most + 1) if total % arrived == 0 < total - arrived)


def _without(cell: Cell, left: float) -> Cell:
    """A cell without a factor that is known exactly: as well known, relatively."""
    ratio = cell.ratio / left
    stderr = cell.stderr * max(abs(cell.ratio), 1.0) / max(abs(ratio), 1.0) / left
    return replace(cell, ratio=ratio, root_ratio=cell.root_ratio / left, stderr=stderr)


def _loss_is_right(cell: Cell) -> bool:
    return abs(cell.root_ratio - 1) <= min(max(cell.tolerance, LEAST), MOST)


def _cost(
    found: Sequence[Judged], left: float, quantities: Mapping[str, float], beside: float | None
) -> tuple[int, int, bool, float, bool, float]:
    """How much is to be explained besides, if the reduction that is missing would have divided by `left`: of those that
    average over so many parts and the one that sums, the one beside which most is right, or, where nothing was reduced
    and tells which it would be, most losses are, or which divides as reductions do `beside`, or the rest is
    simplest."""
    halves = [_without(one.cell, left) for one in found]
    best = min(range(len(found)), key=lambda index: found[index].tolerance)
    ratio = halves[best].ratio
    names = name_number(ratio, quantities, max(found[best].tolerance, 1e-6), max_factors=2)
    averages = all(_averages(one) for one in found)
    return (
        sum(not half.right for half in halves),
        sum(not _loss_is_right(half) and not _reductions(one) for half, one in zip(halves, found, strict=True)),
        beside is not None and abs(beside / left - 1) > LEAST,
        names[0].cost if names else NAMELESS,
        averages == (left == 1.0),
        abs(log(ratio)),
    )


def _reductions(one: Judged) -> list[Step]:
    return [step for step in one.account.steps if isinstance(step.event, Reduce)]


def _averages(one: Judged) -> bool:
    """Whether what reduced this weight, or the wrapper that did not, averages."""
    if reductions := _reductions(one):
        return reductions[-1].factor < 1
    return isinstance(one.account.leaf, Backward) and one.account.leaf.sync is False


def _instead(data: StepData, wrong: list[Judged]) -> list[Judged]:
    """Contributions of other ranks that something unrecorded put in the place of the holder's own: what these weigh is
    its doing too, since an average that takes one rank's gradient is none. Returns the others."""
    lost = {
        (id(one.held), id(gap.end))
        for one in wrong
        if one.gone and one.account.arrived
        for gap in one.account.gaps
        if abs(gap.factor) < FAINT
    }
    rest = []
    for one in wrong:
        ends = one.account.gaps[0].end if one.account.by_hand and one.account.gaps else None
        if ends is None or one.gone or (id(one.held), id(ends)) not in lost:
            rest.append(one)
            continue
        event = last_backward(data, one.held, one.held.rank)
        ratio = one.cell.ratio
        one.shares.append(
            (Culprit("backward", one.held.rank, event, factor=ratio, unrecorded=True, before=ends), ratio)
        )
    return rest


def _measured_behind(data: StepData, one: Judged, event: Event) -> Event | None:
    """The first event behind this one at which the gradient was measured on the rank that holds it."""
    seqs = (entry.seq for entry in one.held.replay.history(one.held.rank) if entry.sampled and entry.seq > event.seq)
    return next((found for seq in seqs if (found := event_at(data, one.held.rank, seq)) is not None), None)

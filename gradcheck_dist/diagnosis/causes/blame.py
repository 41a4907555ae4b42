"""Whose fault a wrong weight is: every wrong cell is given to the culprits whose factors make it up.

What was measured and not documented is a fault of its own, between the two measurements that enclose it. What is wrong
although everything did what it documents is the fault of the fewest recorded hands that, taken away, or made to act
once instead of again and again, leave every weight right. Where no hand helps, the loss is wrong from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, prod

from gradcheck_dist.diagnosis.causes.account import Account, Gap, account
from gradcheck_dist.diagnosis.causes.brackets import merge
from gradcheck_dist.diagnosis.causes.culprit import Culprit, culprit_of_gap, last_backward, order
from gradcheck_dist.diagnosis.causes.early_clips import give_early_clips
from gradcheck_dist.diagnosis.causes.few_lines import free_of_few
from gradcheck_dist.diagnosis.causes.hands import (
    NOISY,
    Judged,
    Surroundings,
    blame_losses,
    recorded,
    settle,
    still_wrong,
)
from gradcheck_dist.diagnosis.causes.loss_scales import free_of_scales
from gradcheck_dist.diagnosis.causes.never_arrived import never_arrived, put_together
from gradcheck_dist.diagnosis.causes.one_line import join_lines
from gradcheck_dist.diagnosis.causes.places import caller_of
from gradcheck_dist.diagnosis.causes.reweighed import laid_together, off_alike
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.causes.spared import give_spared
from gradcheck_dist.diagnosis.causes.token_lines import lay_tokens_to_losses, token_line
from gradcheck_dist.diagnosis.causes.written_divisors import free_of_divisors
from gradcheck_dist.diagnosis.weights.cells import SIGMAS, Cell, Held
from gradcheck_dist.diagnosis.weights.named_counts import common_numbers
from gradcheck_dist.diagnosis.weights.written import scales_by_hand
from gradcheck_dist.events import OptimizerStep
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import StepData

WENT = 0.1
"""A weight that is gone went where so much of it is left, at most: a division on the way may leave a half of it."""


@dataclass
class Blame:
    """One culprit with its part of the matrix: the ratios of `cells` are its share alone. `repeats` tells for each cell
    how often events like the culprit acted on it."""

    culprit: Culprit
    cells: list[tuple[Held, Cell]]
    repeats: list[int]

    @property
    def held(self) -> list[Held]:
        return list({id(held): held for held, _ in self.cells}.values())


def accounted(data: StepData, contributions: Contributions, judged: Sequence[Held]) -> list[Judged]:
    """Each weight with its account."""
    accounts: dict[tuple[object, ...], Account] = {}
    ways: dict[tuple[object, ...], int] = {}  # a signature names every weight: it is hashed once, not for each of them
    every: list[Judged] = []
    for held in judged:
        way = ways.setdefault(held.signature, len(ways))
        largest = max((abs(cell.ratio) for cell in held.cells), default=1.0) or 1.0
        for cell in held.cells:
            key = (way, cell.key, cell.column)
            if key not in accounts:
                accounts[key] = account(data, held, cell)
            loss = contributions.by_key[cell.key].loss
            rounding = EPSILON.get(loss.dtype if loss is not None else "bfloat16", EPSILON["float32"])
            every.append(Judged(held, cell, accounts[key], largest=min(largest, 1.0), rounding=rounding))
    join_lines(every)
    return every


def blame(
    data: StepData,
    contributions: Contributions,
    judged: list[Held],
    quantities: Mapping[str, float],
    *,
    relative: bool = False,
) -> list[Blame]:
    """Group the wrong cells by culprit. `quantities` are degrees and counts that a deliberate factor is made of,
    `relative`: weights are only compared with one another."""
    every = accounted(data, contributions, judged)
    if scales_by_hand(data) or common_numbers(contributions):
        free_of_scales(data, contributions, every)
    if not relative:
        free_of_divisors(data, every)
    lines = free_of_few(data, every)
    found = _blame(data, contributions, judged, every, quantities, relative=relative)
    for one in lines:
        found.append(
            Blame(one.culprit, [(h, with_share(cell, one.number)) for h, cell in one.cells], [1] * len(one.cells))
        )
    return found


def _blame(
    data: StepData,
    contributions: Contributions,
    judged: list[Held],
    every: list[Judged],
    quantities: Mapping[str, float],
    *,
    relative: bool,
) -> list[Blame]:
    """The culprits of accounts that are complete."""
    if any(not one.cell.right for one in every) and (line := token_line(every, contributions)) is not None:
        lay_tokens_to_losses(every, contributions, line)
    if off_alike(judged):
        laid_together(every)
    wrong = [one for one in every if not one.cell.right]
    if give_early_clips(every, wrong, relative=relative):
        return _collect(every)
    blame_losses(contributions, [one for one in wrong if one.account.root == 0])
    wrong = [one for one in wrong if one.account.root != 0]
    place = contributions.coordinate
    # What ranks of one batch add up by hand is no reduction over data: another summand came by a recorded one.
    carried = {(id(one.held), one.cell.key[0]) for one in every if one.account.arrived and not one.account.by_hand}
    brought = [
        one
        for one in every
        if one.account.by_hand
        and not one.gone
        and place.get(one.held.rank) != one.cell.key[0]
        and (id(one.held), one.cell.key[0]) not in carried
    ]
    unseen = {one.held.rank: one for one in brought}
    _liken(wrong)
    wrong, halves = never_arrived(data, contributions, every, wrong, brought, quantities)
    _liken([half.one for half in halves if not half.one.cell.right])
    wrong = give_spared(wrong, every, sure=True)
    changed = [one for one in wrong if one.documented != 0 and one.account.gaps and one.changed_unseen]
    _give_unseen(changed)
    shown = set(map(id, changed))
    for one in wrong:
        if id(one) not in shown and one.like is not None and one.like.shares:
            _give_like(one, one.like)  # too noisy to show by itself what the same way shows in others
    undone = [one for one in wrong if not one.shares and one.documented != 0 and _give_loud(one)]
    came_right = [replace(one, shares=_loud(one)) for one in every if one.cell.right]
    merge([*wrong, *came_right])
    wrong = give_spared(wrong, every)
    # What came out right in spite of its records speaks for no record.
    right = [one for one in every if one.cell.right and abs(one.documented - 1) <= one.allowed]
    by_hand = next((gap.end for one in unseen.values() for gap in one.account.gaps), None) if unseen else None
    noisy = by_hand if any(one.cell.margin > NOISY * max(abs(one.cell.ratio), 1.0) for one in wrong) else None
    around = Surroundings(quantities, lambda held: last_backward(data, held, held.rank), by_hand, noisy)
    unclear = undone or (changed and (any(still_wrong(one) for one in wrong) or _befell_right_ones(wrong, came_right)))
    if not (unclear and settle(contributions, wrong, [(one, one.shares) for one in came_right], around)):
        for one in undone:
            one.shares = []
        recorded(contributions, [one for one in wrong if still_wrong(one)], right, around)
    blame_losses(contributions, [one for one in wrong if not one.shares], noisy)
    _join_noisy(every)
    _join_made_up(every, wrong, came_right)
    put_together(halves)
    _join_missing(every)
    return _collect(every)


def _join_missing(every: Sequence[Judged]) -> None:
    """A reduction that did not follow is one fault on all ranks: it leaves a contribution undivided on its own, and
    gives others nothing of it."""
    missing = {
        (one.cell.key, culprit.kind, caller_of(culprit.event)): culprit.missing
        for one in every
        for culprit, _ in one.shares
        if culprit.absent and culprit.missing is not None and culprit.event is not None
    }
    for one in every if missing else ():
        for index, (culprit, share) in enumerate(one.shares):
            if one.gone and culprit.absent and culprit.missing is None and culprit.event is not None:
                same = missing.get((one.cell.key, culprit.kind, caller_of(culprit.event)))
                one.shares[index] = (replace(culprit, missing=same), share)


def _befell_right_ones(wrong: Sequence[Judged], came_right: Sequence[Judged]) -> bool:
    """Whether what nobody recorded of some wrong weights was done to right ones alike, where a record says what else
    these wrong ones went through."""
    usual = {culprit.identity for one in came_right for culprit, _ in one.shares}
    recorded_alike = {one.account.doings for one in came_right}
    return any(
        one.account.doings not in recorded_alike and any(culprit.identity in usual for culprit, _ in one.shares)
        for one in wrong
    )


def _join_made_up(every: Sequence[Judged], wrong: Sequence[Judged], came_right: Sequence[Judged]) -> None:
    """Losses and what nobody recorded behind them are one law where some weights come out right by both: a buffer that
    each pass divides once more makes 1/2, 1 and 2 of 2, 2 and 2. What shares the fate of wrong ones shares the law."""
    found = {culprit.identity: culprit for one in wrong for culprit, _ in one.shares}
    losses = next((one for one in found.values() if one.kind == "loss"), None)
    behind = next((one for one in found.values() if one.kind != "loss" and one.unrecorded), None)
    if losses is None or behind is None or len(found) > 2:
        return
    made_up = any(
        abs(one.documented - 1) > one.allowed and any(culprit.identity == behind.identity for culprit, _ in one.shares)
        for one in came_right
    )
    if made_up:
        for one in (one for one in every if one.shares and found.keys() >= {each.identity for each, _ in one.shares}):
            whole = replace(losses, factor=one.cell.ratio, nominal=1.0, unrecorded=True, before=behind.before)
            one.shares = [(whole, one.cell.ratio)]


def _join_noisy(every: list[Judged]) -> None:
    """A weight that came out right only as far as its noise can tell shares the fate of those to which the same was
    done, where what they came to is within its noise as well."""
    told: dict[int, list[Judged]] = {}
    for one in every:
        if len(one.shares) > 1:
            told.setdefault(id(one.held), []).append(one)
    for one in every:
        for other in () if one.shares else told.get(id(one.held), ()):
            together = prod(share for _, share in other.shares)
            if _documented_alike(one, other) and abs(together - one.cell.ratio) <= one.cell.margin:
                one.shares = list(other.shares)
                break


def _documented_alike(one: Judged, other: Judged) -> bool:
    mine, theirs = one.account.documented, other.account.documented
    return abs(mine - theirs) <= max(one.allowed, other.allowed) * abs(theirs)


def _loud_gaps(one: Judged) -> list[Gap]:
    """The gaps in which a change was measured beyond doubt."""
    if one.gone:
        return [gap for gap in one.account.gaps if abs(gap.factor) < WENT][:1]  # what is gone cannot go again
    limit = max(SAME, 2 * (one.cell.tolerance - SIGMAS * one.cell.stderr))
    return [gap for gap in one.account.gaps if abs(gap.factor - 1) > max(limit, SIGMAS * gap.noise)]


def _loud(one: Judged) -> list[tuple[Culprit, float]]:
    return [(culprit_of_gap(gap, one.account), gap.factor) for gap in _loud_gaps(one)]


def _give_loud(one: Judged) -> bool:
    """Give what the documented factors do not explain to the gaps in which it was measured beyond doubt."""
    loud = _loud_gaps(one)
    factor = one.cell.ratio / one.documented
    for gap in loud:
        one.shares.append((culprit_of_gap(gap, one.account), factor if len(loud) == 1 else gap.factor))
    return bool(loud)


def _liken(wrong: list[Judged]) -> None:
    """Of weights that went the same way, the better measured ones tell for the others, as far as these agree: what
    differs within noise has no cause of its own."""
    known: dict[tuple[object, ...], list[Judged]] = {}
    for one in sorted(wrong, key=lambda one: one.tolerance):
        tellers = known.setdefault(one.way, [])
        one.like = next((other for other in tellers if _agree(one, other)), None)
        if one.like is None:
            tellers.append(one)
    of_pass: dict[tuple[object, ...], list[Judged]] = {}
    for one in wrong:
        of_pass.setdefault((id(one.held), one.cell.key[1:]), []).append(one)
    for alike in of_pass.values():
        for one in (one for one in alike if one.like is None):
            one.like = next((other for other in alike if _measured_more_often(other, one)), None)
    for one in wrong:
        if one.account.arrived or one.cell.margin <= SAME * one.largest:
            continue
        # Too faint to be seen arriving: it went the way of the others of its slot, if that is within its noise.
        others = (other for way, tellers in known.items() if way[0] == one.cell.key[1:] for other in tellers)
        like = next((other for other in others if other.account.arrived and _agree(one, other)), None)
        if like is not None:
            one.like, one.account = like, replace(like.account, root=one.account.root)


def _measured_more_often(other: Judged, one: Judged) -> bool:
    """Whether a weight in the same gradient, to which the same was done in all, was measured in between where this one
    was not: none of the elements that are sampled there has anything of it."""
    more = len(other.account.gaps) > len(one.account.gaps) and other.account.doings == one.account.doings
    return more and _agree(one, other)


def _give_unseen(changed: list[Judged]) -> None:
    """Give what nobody recorded to the gaps in which it happened."""
    quiet = [one for one in changed if one.like is None and not _give_loud(one)]
    known = {culprit.identity for one in changed for culprit, _ in one.shares}
    for one in quiet:
        _give_likely(one, known)
    for one in changed:
        if one.like is not None and one.like.shares:
            _give_like(one, one.like)
        elif one.like is not None and not _give_loud(one):
            _give_likely(one, known)


def _give_like(one: Judged, like: Judged) -> None:
    own = {culprit.identity: culprit for gap in one.account.gaps
           for culprit in (culprit_of_gap(gap, one.account),)}  # fmt: skip
    one.shares = [(own.get(culprit.identity, culprit), share) for culprit, share in like.shares]


def _agree(one: Judged, other: Judged) -> bool:
    return abs(one.cell.ratio - other.cell.ratio) <= one.cell.margin + other.cell.margin


def _give_likely(one: Judged, known: set[tuple[object, ...]]) -> None:
    """A change that no single measurement shows beyond doubt: where others saw theirs, else where it is loudest."""
    gaps = [(gap, culprit_of_gap(gap, one.account)) for gap in one.account.gaps]
    gaps = [item for item in gaps if item[1].identity in known] or gaps
    _, culprit = max(gaps, key=lambda item: _loudness(item[0]))
    one.shares.append((culprit, one.cell.ratio / one.documented))


def _loudness(gap: Gap) -> float:
    return abs(log(gap.factor)) / (gap.noise + 1e-9) if gap.factor > 0 else float("inf")


def _collect(every: list[Judged]) -> list[Blame]:
    """A matrix for each culprit. The right cells of the same parameters and ranks belong to the shape: 4 2 1 is not
    4 2. A cell that one culprit alone made wrong shows its measured ratio, one of several its share."""
    culprits: dict[tuple[object, ...], Culprit] = {}
    told: dict[tuple[object, ...], list[tuple[Judged, Culprit]]] = {}
    holders: dict[tuple[object, ...], dict[int, None]] = {}
    of_holder: dict[int, list[Judged]] = {}
    for one in every:
        of_holder.setdefault(id(one.held), []).append(one)
        for culprit, _ in one.shares:
            identity = culprit.identity
            if identity not in culprits or order(culprit) < order(culprits[identity]):
                culprits[identity] = culprit
            told.setdefault(identity, []).append((one, culprit))
            holders.setdefault(identity, {}).setdefault(id(one.held))
    result = []
    for identity in sorted(culprits, key=lambda identity: _place(culprits[identity])):
        cells, repeats = [], []
        culprit = _as_measured_best(culprits[identity], told[identity])
        for one in (one for holder in holders[identity] for one in of_holder[holder]):
            shares = [share for blamed, share in one.shares if blamed.identity == identity]
            if one.shares and not shares and one.gone:
                continue  # another's doing hides what this one did
            cell = one.cell
            if (one.shares and len(one.shares) != len(shares)) or len(shares) > 1:
                cell = with_share(cell, prod(shares))
            cells.append((one.held, cell))
            repeats.append(_repeats(one, culprit))
        result.append(Blame(culprit, cells, repeats))
    return result


def _as_measured_best(culprit: Culprit, told: list[tuple[Judged, Culprit]]) -> Culprit:
    """A culprit with the factor of the best known weight, where that of its own weight differs from it by noise."""
    own = next(one for one, other in told if other is culprit)
    best, shown = min(told, key=lambda pair: pair[0].tolerance)
    if culprit.factor is None or not shown.factor or shown.nominal != culprit.nominal:
        return culprit
    by_noise = abs(culprit.factor / shown.factor - 1) <= own.tolerance + best.tolerance
    return replace(culprit, factor=shown.factor) if by_noise else culprit


def with_share(cell: Cell, share: float) -> Cell:
    """A cell that shows a share of its ratio: known as well, relatively, as the whole."""
    if not cell.ratio or not share:
        return replace(cell, ratio=share)
    smaller = abs(share / cell.ratio) * max(abs(cell.ratio), 1.0) / max(abs(share), 1.0)
    stderr = cell.stderr * min(smaller, 1.0)
    return replace(cell, ratio=share, stderr=stderr, tolerance=cell.tolerance + SIGMAS * (stderr - cell.stderr))


def _repeats(one: Judged, culprit: Culprit) -> int:
    event = culprit.event
    return sum(type(step.event) is type(event) and caller_of(step.event) == caller_of(event)
               for step in one.account.steps if event is not None)  # fmt: skip


def _place(culprit: Culprit) -> tuple[int, int, int]:
    event = culprit.event
    last = isinstance(culprit.before, OptimizerStep)
    seq = event.seq if event is not None else 0
    return (int(culprit.kind != "loss"), int(last), seq)

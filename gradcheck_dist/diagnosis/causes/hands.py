"""Which hands are to blame: the fewest that, taken away or made to act once, leave every weight right.

Recorded hands do what they document, so their part of a weight is exact. Hands that nobody recorded were measured, and
are searched together with them: what is meant (a reduction or a division that no probe follows) needs no cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from gradcheck_dist.diagnosis.causes.account import Account, Hand, Step
from gradcheck_dist.diagnosis.causes.brackets import hidden, widen
from gradcheck_dist.diagnosis.causes.culprit import Culprit, blame_loss
from gradcheck_dist.diagnosis.causes.explanations import Search
from gradcheck_dist.diagnosis.causes.places import kind_of
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.causes.vocabulary import GAP, Explanation, Rival, Row
from gradcheck_dist.diagnosis.weights.cells import Cell, Held, weighs_nothing
from gradcheck_dist.events import Event
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions

NOISY = 0.02
"""Where weights are known worse than this, an unrecorded combination of ranks cannot be told from the losses."""
FAINT = 0.2
"""What is known worse than this share of what it should be is not called gone."""
Shares = list[tuple[Culprit, float]]


@dataclass(frozen=True)
class Surroundings:
    """What an explanation may be made of: degrees and counts; the last backward that a parameter took part in; the
    first measurement behind a combination of ranks that nobody recorded, None when all were recorded; the same where
    the weights are so noisy that it cannot be told from the losses."""

    quantities: Mapping[str, float]
    last_backward: Callable[[Held], Event | None]
    by_hand: Event | None = None
    noisy: Event | None = None


@dataclass(eq=False)
class Judged:
    """A cell, its account and the shares of its ratio that were given to culprits. `largest` is the largest ratio of
    the parameter, 1 at most; `rounding` how far the loss's dtype may have rounded the weight, relative; `like` a better
    measured weight that went the same way and came out the same within noise."""

    held: Held
    cell: Cell
    account: Account
    shares: list[tuple[Culprit, float]] = field(default_factory=list)
    meant: float = 1.0
    largest: float = 1.0
    rounding: float = 1e-6
    like: Judged | None = None

    @property
    def way(self) -> tuple[object, ...]:
        """Equal for weights that went through the same events, recorded and measured ones, from the same slot on."""
        return (self.cell.key[1:], *self.account.way)

    @property
    def tolerance(self) -> float:
        return max(SAME, 2 * self.cell.margin / max(abs(self.cell.ratio), 1e-12))

    @property
    def changed_unseen(self) -> bool:
        """Whether more happened to the weight than was documented; in doubt, when less is documented than was seen."""
        ratio, documented = self.cell.ratio, self.documented
        apart = abs(ratio - documented)
        return apart > max(SAME * max(abs(ratio), abs(documented)), 2 * self.cell.margin) or (
            apart > abs(documented - 1) and apart > SAME
        )

    @property
    def gone(self) -> bool:
        """The contribution weighs nothing, and not only because everything here weighs little."""
        if self.like is not None:
            return self.like.gone
        return weighs_nothing(self.cell.ratio, min(self.cell.margin, FAINT), self.largest)

    @property
    def documented(self) -> float:
        """What the recorded hands made of the weight, and those that nobody recorded but that are meant."""
        return self.account.documented * self.meant

    @property
    def allowed(self) -> float:
        """How far `documented` may be off: as the loss's dtype rounds, more where something was measured."""
        return max(SAME, self.exact)

    @property
    def exact(self) -> float:
        if self.meant != 1:
            return max(self.tolerance, self.cell.tolerance)
        return self.cell.tolerance if self.account.measured else self.rounding


def still_wrong(one: Judged) -> bool:
    if one.documented == 0:
        return True
    return abs(one.documented - 1) > one.allowed and not (one.gone and one.shares)


def settle(
    contributions: Contributions, wrong: list[Judged], right: list[tuple[Judged, Shares]], around: Surroundings
) -> bool:
    """Explain recorded hands together with those that nobody recorded: which unseen factors are meant (a reduction that
    no probe follows) and which are to blame. False, and nothing done, when nothing fits."""
    mine = [one for one in wrong if not any(culprit.absent for culprit, _ in one.shares)]
    known = [row for one, gaps in right if (row := _with_gaps(one, gaps)) is not None]
    rows = {id(one): _with_gaps(one, one.shares) for one in mine}
    search = Search(few_rows([row for row in rows.values() if row is not None]), few_rows(known), around.quantities)
    fits = search.best()
    if not fits or not all(row is not None and search.explains(row, fits[0]) for row in rows.values()):
        return False
    rivals, doubts = search.formulas.rivals(fits), search.in_doubt(fits[0])
    carriers = {row.carried_by for row in rows.values() if row is not None} & fits[0].gaps
    for one in mine:
        gaps: dict[Hand, tuple[Culprit, float]] = {}
        for culprit, share in one.shares:
            first, before = gaps.get(_gap_hand(culprit), (culprit, 1.0))
            gaps[_gap_hand(culprit)] = (first, before * share)
        row = rows[id(one)]
        assert row is not None
        blamed = {edit.hand: search.effect(row, edit) for edit in fits[0].edits if edit.hand in gaps}
        blamed |= {hand: value for hand, value in fits[0].others if hand in gaps}
        chosen = fits[0]
        if chosen.loss is not None and (carrier := next(iter(carriers & gaps.keys()), None)) is not None:
            # What combined ranks unseen and is to blame multiplies by no known number: the losses' constant is its own.
            blamed[carrier] = blamed.get(carrier, 1.0) * chosen.loss
            chosen = replace(chosen, loss=None)
        one.meant = prod(share / blamed.get(hand, 1.0) for hand, (_, share) in gaps.items() if blamed.get(hand) != 0)
        one.shares = [
            (replace(gaps[hand][0], hidden=hidden(search, chosen, hand)), value)
            for hand, value in blamed.items()
            if value != 1
        ]
        _share(contributions, one, chosen, rivals, search, around)
        unseen = {hand: culprit for hand, (culprit, _) in gaps.items()}
        for cause, instead in doubts.items():
            widen(contributions, one, unseen, cause, instead)
        if len(one.shares) == 1:
            one.shares = [(one.shares[0][0], one.cell.ratio)]
    return True


def _gap_hand(culprit: Culprit) -> Hand:
    return (GAP, culprit.kind, 0, culprit.identity, None)


def _with_gaps(one: Judged, gaps: Shares) -> Row | None:
    """The row of a weight with the factors that nobody recorded; None for a right one that they do not make right."""
    total = 0.0 if one.gone else one.account.documented * prod(share for _, share in gaps)
    factors = tuple((_gap_hand(culprit), 0.0 if one.gone else share) for culprit, share in gaps)
    allowed = max(one.tolerance, one.cell.tolerance) if gaps else one.allowed
    if one.cell.right and abs(total - 1) > allowed:
        return None
    carried_by = next((_gap_hand(culprit) for culprit, _ in gaps if _brought(one.account, culprit)), None)
    return Row(one.account, total, allowed, one.exact, factors, carried_by)


def _brought(account: Account, culprit: Culprit) -> bool:
    """Whether a contribution of another rank came here by what this culprit did."""
    first = account.gaps[0] if account.by_hand and account.gaps else None
    return first is not None and culprit.event is first.start and culprit.before is first.end


def few_rows(rows: list[Row]) -> list[Row]:
    """Of rows to which the same hands did something the best measured one, and those that came out otherwise."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row.account.doings, tuple(hand for hand, _ in row.gaps)), []).append(row)
    few = []
    for members in found.values():
        best = min(members, key=lambda row: row.allowed)
        best = replace(best, carried_by=next((row.carried_by for row in members if row.carried_by is not None), None))
        # The farthest one may be so for its noise alone, and hide others that are known to be apart.
        apart = sorted((row for row in members if _are_apart(row, best)), key=lambda row: row.documented)
        less = [row for row in apart if row.documented < best.documented]
        few += [best, *less[:1], *apart[len(less) :][-1:]]
    return few


def _are_apart(row: Row, other: Row) -> bool:
    allowed = (row.allowed + other.allowed) * max(abs(row.documented), abs(other.documented))
    return abs(row.documented - other.documented) > allowed


def _rows(cells: list[Judged]) -> list[Row]:
    """One row for weights to which the same was done; two where they came out differently."""
    found: dict[tuple[object, ...], list[Judged]] = {}
    for one in cells:
        found.setdefault((one.account.doings, one.meant == 1), []).append(one)
    rows = []
    for members in found.values():
        ordered = sorted(members, key=lambda one: one.documented)
        alike = abs(ordered[-1].documented - ordered[0].documented) <= ordered[0].allowed * abs(ordered[0].documented)
        rows += [_row(one) for one in (ordered[:1] if alike else (ordered[0], ordered[-1]))]
    return rows


def _row(one: Judged) -> Row:
    return Row(one.account, one.documented, one.allowed, one.exact)


def recorded(contributions: Contributions, wrong: list[Judged], right: list[Judged], around: Surroundings) -> None:
    """Find the cheapest causes that explain all that is wrong; what they leave over is looked at again."""
    known = _rows(right)
    while wrong:
        search = Search(_rows(wrong), known, around.quantities)
        fits = search.best() or search.partly()
        explained = [one for one in wrong if fits and search.explains(_row(one), fits[0])]
        if not explained:
            _unexplained(contributions, wrong, {one.cell.key for one in right}, around)
            return
        rivals = search.formulas.rivals(fits)
        for one in explained:
            _share(contributions, one, fits[0], rivals, search, around)
        done = set(map(id, explained))
        wrong = [one for one in wrong if id(one) not in done]


def _share(
    contributions: Contributions,
    one: Judged,
    chosen: Explanation,
    rivals: tuple[Rival, ...],
    search: Search,
    around: Surroundings,
) -> None:
    """Give a weight's factors to the causes of the cheapest explanation; the others that fit are kept as rivals."""
    alone = not one.shares and len(chosen.edits) + len(chosen.others) + (chosen.loss is not None) == 1
    row, given = _row(one), []
    if chosen.loss is not None:
        culprit = blame_loss(contributions.by_key[one.cell.key], one.account.root)
        by_hand = around.by_hand if not chosen.edits and abs(one.meant) >= 1 - SAME else None
        if by_hand is not None and search.could_divide(chosen.loss / one.meant):
            # Ranks were combined by something that nobody recorded: it may as well be that which should have divided.
            culprit = replace(culprit, unrecorded=True, before=by_hand)
        given.append((_loss_or_hand(culprit, around.noisy), chosen.loss))
    for edit in chosen.edits:
        if edit.hand[0] == GAP:
            continue
        value = search.effect(row, edit)
        if value != 1:
            given.append((_culprit_of_hand(one, edit.hand, edit.mode, search), value))
    for hand, value in chosen.others:
        if hand[0] != GAP and hand in one.account.factors:
            given.append((_culprit_of_hand(one, hand, "other", search), value))
    for culprit, value in given:
        one.shares.append((replace(culprit, rivals=rivals), one.cell.ratio if alone else value))


def _unexplained(
    contributions: Contributions, wrong: list[Judged], right_keys: set[ContributionKey], around: Surroundings
) -> None:
    """Nothing that was recorded explains these. A loss of which other weights came out right is not to blame."""
    for one in wrong:
        if one.cell.key not in right_keys:
            blame_losses(contributions, [one], around.noisy)
            continue
        event = around.last_backward(one.held)
        share = one.documented if one.shares else one.cell.ratio
        one.shares.append((Culprit("backward", one.held.rank, event, factor=one.cell.ratio, absent=True), share))


def blame_losses(contributions: Contributions, wrong: list[Judged], by_hand: Event | None = None) -> None:
    for one in wrong:
        culprit = _loss_or_hand(blame_loss(contributions.by_key[one.cell.key], one.account.root), by_hand)
        one.shares.append((culprit, one.documented if one.shares else one.cell.ratio))


def _loss_or_hand(culprit: Culprit, by_hand: Event | None) -> Culprit:
    """A loss is to blame; but where something that nobody recorded combined ranks and noise is high, that may as well
    have done it: the bracket reaches from the loss to the first measurement behind it."""
    return culprit if by_hand is None else replace(culprit, unrecorded=True, before=by_hand)


def _culprit_of_hand(one: Judged, hand: Hand, mode: str, search: Search) -> Culprit:
    if mode == "missing":
        others = next(row.account for row in search.rows if hand in row.account.factors)
        step = next(step for step in others.steps if step.hand == hand)
        last = one.account.steps[-1] if one.account.steps else None
        event = last.event if last is not None else one.account.leaf
        return Culprit("backward" if last is None else kind_of(last.event), one.held.rank, event,
                       factor=one.cell.ratio, absent=True, missing=step.event)  # fmt: skip
    steps: list[Step] = [step for step in one.account.steps if step.hand == hand]
    acting = steps[1:] if mode == "once" else steps
    step = next((step for step in acting if step.factor != 1), acting[0])
    measured = next((gap.factor for gap in one.account.gaps if gap.inside and gap.end is step.event), 1.0)
    if any(not share for _, share in one.shares):
        measured = 1.0  # of what something else emptied nothing was left to measure
    nominal = None if step.opaque else step.factor
    return Culprit(kind_of(step.event), step.rank, step.event, nominal=nominal, factor=step.factor * measured,
                   wrong_constant=mode == "other")  # fmt: skip

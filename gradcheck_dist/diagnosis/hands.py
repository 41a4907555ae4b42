"""Which hands are to blame: the fewest that, taken away or made to act once, leave every weight right.

Recorded hands do what they document, so their part of a weight is exact. Hands that nobody recorded were measured; what
could be meant (a reduction or a division that no probe follows) is excused where that leaves one thing to blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import log2, prod
from statistics import median

from gradcheck_dist.diagnosis.account import SAME, Account, Hand, Step
from gradcheck_dist.diagnosis.cells import Cell, Held
from gradcheck_dist.diagnosis.culprit import Culprit, blame_loss, kind_of
from gradcheck_dist.diagnosis.factors import name_number
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions

SIMPLE = 1.9
"""Cost below which a name is one degree or count, once."""

Edit = tuple[Hand, str]
"""(hand, "never" or "once"): that recorded hand is taken away, or acts on a contribution only the first time."""


@dataclass(eq=False)
class Judged:
    """A cell, its account and the shares of its ratio that were given to culprits."""

    held: Held
    cell: Cell
    account: Account
    shares: list[tuple[Culprit, float]] = field(default_factory=list)
    meant: float = 1.0
    largest: float = 1.0

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
        return abs(self.cell.ratio) <= max(SAME * self.largest, self.cell.margin)

    @property
    def documented(self) -> float:
        """What the recorded hands made of the weight, and those that nobody recorded but that are meant."""
        return self.account.documented * self.meant

    @property
    def allowed(self) -> float:
        """How far `documented` may be off: it is exact, except for what had to be measured."""
        exact = max(SAME, self.cell.tolerance)
        return exact if self.meant == 1 else max(exact, self.tolerance)


def still_wrong(one: Judged) -> bool:
    if one.documented == 0:
        return True
    return abs(one.documented - 1) > one.allowed and not (one.gone and one.shares)


def excuse(
    wrong: list[Judged], right: list[Judged], right_keys: set[ContributionKey], quantities: Mapping[str, float]
) -> None:
    """Decide which unseen factors are meant (a reduction or a division that no probe follows): those that, taken as
    meant, leave one thing to blame instead of two. Those lose their share and count as documented."""
    rest = [one for one in wrong if still_wrong(one)]
    changed = [one for one in wrong if one.shares and not one.gone and not one.shares[0][0].absent]
    if not rest or not any(one.shares for one in rest) or _fitting(rest, right) is not None:
        return
    gaps = list(dict.fromkeys(culprit.identity for one in changed for culprit, _ in one.shares))
    saved = [(one, one.shares, one.meant) for one in wrong]
    for faulty in (None, *gaps):
        for one in changed:
            one.meant = prod(share for culprit, share in one.shares if culprit.identity != faulty)
            one.shares = [item for item in one.shares if item[0].identity == faulty]
        left = [one for one in wrong if not (one.shares and not one.gone) and still_wrong(one)]
        off = any(still_wrong(one) for one in changed if one.shares)
        if not off and (not left or (faulty is None and _fitting(left, right) is not None)):
            return
        for one, shares, meant in saved:
            one.shares, one.meant = shares, meant
    factors = {gap: [share for one in changed for culprit, share in one.shares if culprit.identity == gap]
               for gap in gaps}  # fmt: skip
    if all(_deliberate(median(values), quantities) for values in factors.values()):
        if _alike(changed) and not right_keys & {one.cell.key for one in changed}:
            for one in changed:
                one.meant, one.shares = prod(share for _, share in one.shares), []
    elif len(gaps) == 1:
        for one in changed:
            one.shares = [(one.shares[0][0], one.cell.ratio)]
            one.meant = 1 / one.account.documented


def _alike(cells: list[Judged]) -> bool:
    ratios = [one.cell.ratio for one in cells]
    return max(ratios) - min(ratios) <= 2 * max(one.cell.margin for one in cells)


def _deliberate(factor: float, quantities: Mapping[str, float]) -> bool:
    """Whether a trainer could mean this factor: made of degrees and counts, or a loss scale's reciprocal."""
    if factor <= 0:
        return False
    exponent = -log2(factor)
    scale = exponent >= 8 and abs(exponent - round(exponent)) < 1e-2
    return scale or any(name.cost < SIMPLE for name in name_number(factor, quantities, 5e-3, max_factors=1))


def _effect(one: Account, edit: Edit) -> float:
    """By what the hand in question multiplied this weight (all but the first time)."""
    hand, mode = edit
    factors = one.factors.get(hand, [])
    return prod(factors if mode == "never" else factors[1:])


def _explains(one: Judged, edits: Iterable[Edit], constant: float = 1.0) -> bool:
    value = constant
    for edit in edits:
        value *= _effect(one.account, edit)
    if value == 0 or one.documented == 0:
        return value == one.documented
    return abs(one.documented / value - 1) <= one.allowed


def recorded(contributions: Contributions, wrong: list[Judged], right: list[Judged]) -> None:
    """Find the fewest hands that explain all that is wrong; what they leave over is looked at again."""
    while wrong:
        edits = _edits(wrong, right)
        fits = _fitting(wrong, right, most=3)
        shared = _shared_constant(wrong, right)
        if shared is not None and (fits is None or len(fits) > 1):
            blame_losses(contributions, wrong)
            return
        if fits is None:
            fits = max(
                (chosen for count in (1, 2) for chosen in combinations(edits, count)),
                key=lambda chosen: sum(_explains(one, chosen) for one in wrong) - 0.5 * len(chosen),
                default=(),
            )
        explained = [one for one in wrong if fits and _explains(one, fits)]
        if not explained:
            blame_losses(contributions, wrong)
            return
        for one in explained:
            for edit in fits:
                if _effect(one.account, edit) != 1:
                    one.shares.append((_culprit_of_hand(one, edit), _effect(one.account, edit)))
        done = set(map(id, explained))
        wrong = [one for one in wrong if id(one) not in done]


def _fitting(wrong: list[Judged], right: list[Judged], most: int = 2) -> tuple[Edit, ...] | None:
    """The fewest recorded hands that explain all that is wrong."""
    edits = _edits(wrong, right)
    choices = (chosen for count in range(1, most + 1) for chosen in combinations(edits, count))
    return next((chosen for chosen in choices if all(_explains(one, chosen) for one in wrong)), None)


def _edits(wrong: list[Judged], right: list[Judged]) -> list[Edit]:
    """Edits that change something that is wrong and nothing that is right, in the order of the events."""
    hands = dict.fromkeys(hand for one in wrong for hand in one.account.factors)
    faulty = {one.account.doings: one.account for one in wrong}.values()
    healthy = {one.account.doings: one.account for one in right}.values()
    return [
        edit
        for mode in ("never", "once")
        for hand in hands
        if any(_effect(one, edit := (hand, mode)) != 1 for one in faulty)
        and all(_effect(one, edit) == 1 for one in healthy)
    ]


def _shared_constant(wrong: list[Judged], right: list[Judged]) -> float | None:
    """The factor by which everything that contributions of these losses are in is off, None when there is none."""
    if {one.cell.key for one in wrong} & {one.cell.key for one in right}:
        return None
    values = [one.documented for one in wrong]
    low, high = min(values), max(values)
    tolerance = max(one.allowed for one in wrong)
    return values[0] if low > 0 and high / low - 1 <= 2 * tolerance else None


def blame_losses(contributions: Contributions, wrong: list[Judged]) -> None:
    for one in wrong:
        culprit = blame_loss(contributions.by_key[one.cell.key], one.account.root)
        one.shares.append((culprit, one.documented if one.shares else one.cell.ratio))


def _culprit_of_hand(one: Judged, edit: Edit) -> Culprit:
    hand, mode = edit
    steps: list[Step] = [step for step in one.account.steps if step.hand == hand]
    acting = steps if mode == "never" else steps[1:]
    step = next(step for step in acting if step.factor != 1)
    measured = next((gap.factor for gap in one.account.gaps if gap.inside and gap.end is step.event), 1.0)
    nominal = None if step.opaque else step.factor
    return Culprit(kind_of(step.event), step.rank, step.event, nominal=nominal, factor=step.factor * measured)

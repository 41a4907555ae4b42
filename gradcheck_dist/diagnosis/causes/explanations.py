"""The cheapest set of causes that explains every documented weight, the right ones among them.

Recorded hands do what they document, so a weight is off by loss * product of hands. A cause corrects one factor of it:
a hand that should not have acted ("never"), that should have acted once ("once"), that should have multiplied by
another constant ("other"), one that others went through and this weight did not ("missing"), an unrecorded one that
differs from what it is for right weights ("elsewhere"), or the loss, which should carry another constant. Costs are
description lengths: a cause, and the name of each number that it needs. A right weight is a row like any other, so a
cause that would make it wrong costs a second one that mends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import prod
from statistics import median

import numpy as np

from gradcheck_dist.diagnosis.causes.account import Hand
from gradcheck_dist.diagnosis.causes.averages import divides_by, summed_ranks
from gradcheck_dist.diagnosis.causes.rivals import Formulas
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.causes.vocabulary import (
    ALIKE,
    CAUSE,
    CLIPPED,
    COARSE,
    DIVIDES_TOO,
    GAP,
    LOSS,
    LOSSES,
    MISSING,
    MOST_REFERENCES,
    MOST_RIVALS,
    OTHER,
    OTHER_AVERAGE,
    OTHER_GAP,
    RANKS,
    SCHEDULE,
    TIE,
    Edit,
    Explanation,
    Row,
    choices,
    cost_of_name,
    divided_too,
    divides,
    effect,
    ends_step,
    follows_norm,
    is_power_of_two,
    is_scale,
    is_scaling,
    nameless,
    needed,
    over_averaged,
    same,
)
from gradcheck_dist.diagnosis.weights.factors import Name, name_number

PASSES = RANKS | SCHEDULE
"""What a line divides tokens by behind losses that were divided by their passes (N/(R K)); not what names a factor
that no clip would have."""


@dataclass
class Search:
    """All explanations of `wrong` rows that leave `right` rows right."""

    wrong: Sequence[Row]
    right: Sequence[Row]
    quantities: Mapping[str, float]
    tied: list[Explanation] = field(default_factory=list)
    _names: dict[tuple[float, float, bool], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = [*self.wrong, *self.right]
        self.hands: list[Hand] = list(dict.fromkeys(hand for row in self.rows for hand in row.factors))
        # A hand does one thing; what it does to most weights that it met stands for it where it is missing.
        self.factor_of = {
            hand: median([prod(row.factors[hand]) for row in rows])
            for hand in self.hands
            for rows in [[row for row in self.right or self.rows if hand in row.factors]
                         or [row for row in self.rows if hand in row.factors]]
        }  # fmt: skip
        self.formulas = Formulas(self.wrong, self.factor_of, self.quantities, self._exact)
        self.edits = [edit for mode in ("never", "once", "missing", "elsewhere") for edit in self._edits(mode)]
        self.only_clips = {hand for hand in self.clips if follows_norm(hand)}
        divides = self.clips - self.only_clips
        self.edits += [edit for hand in divides for edit in divided_too(hand, self.rows, self.quantities)]

    def _edits(self, mode: str) -> Iterator[Edit]:
        """Edits that change something that is wrong."""
        carriers = {row.carried_by for row in self.rows}
        for hand in self.hands:
            if (hand[0] == GAP and mode == "missing") or (hand[0] != GAP and mode == "elsewhere"):
                continue
            if mode == "never" and hand in carriers:
                continue  # without it other ranks' contributions would not be here
            if mode == "missing" and not (0 < abs(self.factor_of[hand]) != 1):
                continue
            references = self._references(hand) if mode == "elsewhere" else [self.factor_of[hand]]
            for edit in (Edit(hand, mode, reference) for reference in references):
                if any(self.effect(row, edit) != 1 for row in self.wrong):
                    yield edit

    def _references(self, hand: Hand) -> list[float]:
        """What an unrecorded hand should have done: what it did to right weights; where none is right, what it did to
        some of the wrong ones."""
        if any(hand in row.factors for row in self.right):
            return [self.factor_of[hand]]
        values: list[float] = []
        for row in (row for row in self.rows if hand in row.factors):
            value = prod(row.factors[hand])
            if value and all(abs(value / known - 1) > 2 * row.allowed for known in values):
                values.append(value)
        return [*values[:MOST_REFERENCES], *self._needed(hand)] if len(values) > 1 else []

    def _needed(self, hand: Hand) -> list[float]:
        value = needed(hand, self.rows)
        return [value] if value is not None and self._divisors(hand, 1 / value, self._beside(hand), PASSES) else []

    def _beside(self, hand: Hand) -> float:
        """How well what a hand should do is known: what was measured of the hand itself cancels in it."""
        return max(self._exact, self._known({hand}))

    def effect(self, row: Row, edit: Edit) -> float:
        return effect(row.factors, edit)

    def best(self) -> list[Explanation]:
        """The cheapest explanation, and rivals that cost little more and fit only because sizes happen to be equal; []
        when none fits."""
        found: list[Explanation] = []
        limit = float("inf")
        for chosen in choices(self.edits):
            # What begins where the norm was taken and is left as it is would be meant: somebody wrote its number.
            left = set() if self.right else self.only_clips - {edit.hand for edit in chosen}
            base = sum(self._cost_of(edit) for edit in chosen) + nameless(self._exact) * len(left)
            if base > limit + ALIKE:
                continue
            for explanation in self._completed(chosen, base, limit + ALIKE):
                found.append(explanation)
                limit = min(limit, explanation.cost)
        found.sort(key=lambda one: one.cost)
        self.tied = [one for one in found if one.cost <= limit + TIE]
        if not found:
            return []
        if any(one.gaps for one in self.tied):
            # Beside what nobody recorded, of explanations as good the one that accuses least of what was recorded.
            first = min(self.tied, key=lambda one: (len(one.causes), len(one.causes - one.gaps), one.cost))
            found = [first, *(one for one in found if one is not first)]
        known = [self.formulas.powers(found[0])]
        best = found[:1]
        for one in found[1:]:
            powers = self.formulas.powers(one)
            if one.cost <= limit + ALIKE and len(best) <= MOST_RIVALS and not any(same(powers, old) for old in known):
                best.append(one)
                known.append(powers)
        return best

    def _cost_of(self, edit: Edit) -> float:
        if edit.mode == "elsewhere" and edit.reference in self._needed(edit.hand):
            tolerance = self._beside(edit.hand)
            return MISSING + self.divisor_cost(edit.hand, 1 / edit.reference, PASSES, tolerance=tolerance)
        if edit.mode in ("missing", "elsewhere"):
            return MISSING
        if edit.mode == "clipped":
            return CLIPPED + DIVIDES_TOO + self.divisor_cost(edit.hand, 1 / edit.reference, PASSES)
        return CLIPPED if edit.mode == "never" and edit.hand in self.clips else CAUSE

    @cached_property
    def clips(self) -> set[Hand]:
        """The unrecorded hands that may be clips."""
        found = set()
        for hand in (hand for hand in self.hands if hand[0] == GAP and ends_step(hand)):
            values = [(prod(row.factors[hand]), row.allowed) for row in self.rows if hand in row.factors]
            if len(values) < len(self.rows) or not all(0 < value < 1 for value, _ in values):
                continue
            alike = all(abs(value / values[0][0] - 1) <= 2 * (allowed + values[0][1]) for value, allowed in values)
            if alike and not self._named(hand):
                found.add(hand)
        return found

    def _named(self, hand: Hand) -> bool:
        """Whether an unrecorded hand's number is one that somebody could be meant to divide by."""
        tolerance = min(max(2 * min(row.allowed for row in self.rows if hand in row.factors), SAME), COARSE)
        value = self.factor_of[hand]
        return bool(value) and bool(self._divisors(hand, 1 / value, tolerance))

    def _undoes(self, hand: Hand) -> bool:
        """Whether an unrecorded hand multiplies by what a recorded reduction divides by: a sum is meant by both."""
        value = self.factor_of[hand]
        averages = (factor for known, factor in self.factor_of.items() if known[0] == "Reduce" and 0 < factor < 1)
        return any(abs(value * factor - 1) <= SAME for factor in averages)

    def _cost_of_other(self, hand: Hand) -> float:
        """The cost of a hand that should multiply by another number."""
        if hand[0] != GAP:
            return OTHER
        factors = [factor for row in self.rows for factor in row.factors.get(hand, [])]
        return OTHER_AVERAGE if any(divides_by(factors, ranks) for ranks in self._summed) else OTHER_GAP

    @cached_property
    def _summed(self) -> set[int]:
        return summed_ranks(step for row in self.rows for step in row.account.steps)

    def in_doubt(self, chosen: Explanation) -> dict[Hand, Hand]:
        """What is to blame as well as a cause of the chosen explanation, one of the two being a hand that nobody
        recorded: of two that multiply the same weights, which has the wrong number cannot be told."""
        found: dict[Hand, Hand] = {}
        for other in self.tied:
            mine, theirs = chosen.causes - other.causes, other.causes - chosen.causes
            if len(mine) == len(theirs) == 1:
                (cause,), (instead,) = mine, theirs
                if GAP in (cause[0], instead[0]):
                    found.setdefault(cause, instead)
            elif chosen.causes == other.gaps and theirs == {LOSSES}:
                # The losses are off and a clip followed, or a line that should have put them right divided wrongly.
                found.update(dict.fromkeys(chosen.gaps, LOSSES))
        return found

    def partly(self) -> list[Explanation]:
        """The single cause, or pair of edits, that explains most of what is wrong and harms nothing that is right."""
        harmless = [edit for edit in self.edits if all(self.effect(row, edit) == 1 for row in self.right)]
        found = [Explanation(chosen) for count in (1, 2) for chosen in combinations(harmless, count)]
        known = {hand for row in self.right for hand in row.factors}
        found += [
            Explanation(others=((hand, row.documented),))
            for row in self.wrong
            for hand in row.factors
            if hand not in known and is_scaling(hand) and row.documented
        ]
        if not self.right:
            found += [Explanation(loss=row.documented) for row in self.wrong if row.documented]
        scored = [(sum(self.explains(row, one) for row in self.wrong), -len(one.edits), one) for one in found]
        most = max(((count, size) for count, size, _ in scored), default=(0, 0))
        return [one for count, size, one in scored if (count, size) == most][:1] if most[0] else []

    def explains(self, row: Row, explanation: Explanation) -> bool:
        value = prod((self.effect(row, edit) for edit in explanation.edits), start=explanation.loss or 1.0)
        value *= prod(factor for hand, factor in explanation.others if hand in row.factors)
        if value == 0 or row.documented == 0:
            return value == row.documented
        return abs(row.documented / value - 1) <= 2 * row.allowed * min(abs(row.documented / value), 1.0)

    def _completed(self, edits: tuple[Edit, ...], base: float, limit: float) -> Iterator[Explanation]:
        """With as few constants as it takes: none, or else the loss's, one hand's, both, or two hands'."""
        rest = self._rest(edits)
        if rest is None:
            return
        if self._fit(rest, False, ()) == []:
            yield Explanation(edits, cost=base)
            return
        edited = {edit.hand for edit in edits} | self.only_clips
        free = [hand for hand in self.hands if hand not in edited and is_scaling(hand) and self.factor_of[hand]]
        sets: list[tuple[bool, tuple[Hand, ...]]] = [(True, ())]
        sets += [(with_loss, (hand,)) for with_loss in (False, True) for hand in free]
        sets += [(False, pair) for pair in combinations(free, 2)]
        for with_loss, hands in sets:
            least = base + (LOSS + 1 if with_loss else 0) + OTHER_GAP * len(hands)
            constants = self._fit(rest, with_loss, hands) if least <= limit else None
            if constants is None:
                continue
            cost, loss = base, constants[0] if with_loss else None
            if loss is not None:
                cost += LOSS + self._loss_cost(loss, edited | set(hands))
            others = tuple(zip(hands, constants[int(with_loss) :], strict=True))
            for hand, value in others:
                cost += self._cost_of_other(hand)
                divisor = self._intended(rest, loss, others, hand, value)
                cost += self.divisor_cost(hand, divisor, may_scale=not edits)
            yield Explanation(edits, loss, others, cost)

    def _intended(
        self, rest: np.ndarray, loss: float | None, others: Sequence[tuple[Hand, float]], hand: Hand, value: float
    ) -> float:
        """What a hand should divide by. The noise of what was measured of it is in what is left of a row as well, and
        cancels."""
        rows = [(row.allowed, index) for index, row in enumerate(self.rows) if row.factors.get(hand)]
        if not rows:
            return value / self.factor_of[hand]
        index = min(rows)[1]
        met = self.rows[index].factors
        more = prod((other for known, other in others if known != hand and known in met), start=loss or 1.0)
        return float(rest[index]) / more / prod(met[hand])

    def _rest(self, edits: Iterable[Edit]) -> np.ndarray | None:
        """What is left of each row's ratio after the edits; None when a weight that is gone stays gone, or one that
        is there would be brought back from nothing."""
        rest = []
        for row in self.rows:
            value = prod(self.effect(row, edit) for edit in edits)
            if (value == 0) != (row.documented == 0):
                return None
            rest.append(row.documented / value if value else 1.0)
        return np.array(rest)

    def _fit(self, rest: np.ndarray, with_loss: bool, hands: tuple[Hand, ...]) -> list[float] | None:
        """The constants that make up what is left of every row; None when there are none, or one of them is 1."""
        allowed = np.array([row.allowed for row in self.rows])
        if not with_loss and not hands:
            return [] if np.all(np.abs(rest - 1) <= allowed * np.minimum(np.abs(rest), 1.0)) else None
        sign = 1.0
        if np.all(rest < 0) and with_loss:
            sign, rest = -1.0, -rest
        if np.any(rest <= 0):
            return None
        columns = [np.ones(len(rest))] if with_loss else []
        columns += [np.array([float(hand in row.factors) for row in self.rows]) for hand in hands]
        design = np.stack(columns, axis=1)
        weights = 1.0 / np.maximum(allowed, 1e-9)[:, None]
        solution, _, rank, _ = np.linalg.lstsq(design * weights, np.log(rest) * weights[:, 0], rcond=None)
        if rank < len(columns) or np.any(np.abs(np.exp(design @ solution) / rest - 1) > 2 * allowed):
            return None
        if _are_apart(design, rest, allowed):
            return None
        constants = np.exp(solution)
        if with_loss:
            constants[0] *= sign
        return None if np.any(np.abs(constants - 1) <= allowed.min()) else constants.tolist()

    def divisor_cost(
        self,
        hand: Hand,
        divisor: float,
        over: Set[str] = RANKS,
        *,
        may_scale: bool = True,
        tolerance: float | None = None,
    ) -> float:
        """How natural it would be for a hand to divide by this number: reductions divide by ranks, schedules by
        microbatches, a line of the user's by anything that it can count, tokens over what `over` names, or by a loss
        scale. `may_scale`: not where other causes beside it would make one of any power of two."""
        tolerance = self._exact if tolerance is None else tolerance
        if abs(divisor - 1) <= max(tolerance, SAME):
            return 0.0
        if may_scale and hand[0] == GAP and self._is_loss_scale(divisor):
            return 1.0
        names = self._divisors(hand, divisor, tolerance, over)
        return min((0.5 + 0.5 * len(name.powers) for name in names), default=nameless(self._exact))

    def could_divide(self, divisor: float) -> bool:
        """Whether a line of the user's could be meant to divide by this number."""
        return bool(self._divisors((GAP,), divisor, COARSE))

    def _divisors(self, hand: Hand, divisor: float, tolerance: float, over: Set[str] = RANKS) -> list[Name]:
        meant = set(self.quantities) if hand[0] == GAP else SCHEDULE if hand[0] == "ScaleGrads" else RANKS
        if hand[0] == "Reduce" and divisor > self.quantities.get("world_size", divisor) * (1 + tolerance):
            return []  # no average is over more ranks than there are
        known = {name: value for name, value in self.quantities.items() if name in meant and value > 1}
        known |= self._divided if hand[0] == GAP else {}
        names = name_number(divisor, known, tolerance, max_factors=3)
        # Tokens are divided by what they are averaged over (N/R); all else is a product.
        return [name for name in names if divides(dict(name.powers), over | self._divided.keys())]

    @cached_property
    def _divided(self) -> dict[str, float]:
        """What recorded reductions divide by and is no degree: a line of the user's may make up for it."""
        found = {f"divisor {hand[4]}": 1 / value for hand, value in self.factor_of.items()
                 if hand[0] == "Reduce" and 0 < value < 1}  # fmt: skip
        return {name: value for name, value in found.items() if value not in self.quantities.values()}

    @cached_property
    def _averages(self) -> set[str]:
        """The degrees by which recorded reductions divide, one by one or together."""
        over = [1 / value for hand, value in self.factor_of.items() if hand[0] == "Reduce" and 0 < value < 1]
        sizes = {name: self.quantities[name] for name in RANKS & self.quantities.keys()}
        return {name for name, size in sizes.items() if any(abs(one / size - 1) <= SAME for one in (*over, prod(over)))}

    def _is_loss_scale(self, value: float) -> bool:
        """Whether this is a loss scale that nobody took away again, as far as was recorded."""
        return not any(known[0] == "AmpUnscale" for known in self.hands) and is_scale(value, 1e-2)

    @cached_property
    def _exact(self) -> float:
        """To how many digits recorded numbers are known that an explanation has to account for."""
        return min(max(2 * min((row.exact for row in self.rows), default=0.0), 1e-6), COARSE)

    def _loss_cost(self, loss: float, blamed: Set[Hand]) -> float:
        """The cost of the constant of all losses. Beside an unrecorded number that is meant and has no name, no name of
        what is left says why the losses have just the constant that makes up for it."""
        meant = {hand for row in self.wrong for hand, _ in row.gaps} - blamed
        if not all(self._named(hand) or self._undoes(hand) for hand in meant):
            return nameless(self._exact)
        # Freed of a hand that halves, any power of two is a larger one: 128 is no loss scale of 256 that is averaged.
        halved = any(is_power_of_two(1 / abs(self.factor_of.get(hand) or 1.0)) for hand in blamed)
        return self._name_cost(loss, self._known(blamed), may_scale=not halved)

    def _known(self, blamed: Set[Hand]) -> float:
        """How well the constant is known that all rows share, relative: what unrecorded hands did that are not blamed
        is part of it, and was measured."""
        exact = (row.exact if all(hand in blamed for hand, _ in row.gaps) else row.allowed for row in self.rows)
        return min(max(min(exact), 1e-6), COARSE)

    def _name_cost(self, value: float, tolerance: float, *, may_scale: bool) -> float:
        key = (value, tolerance, may_scale)
        if key not in self._names:
            found = (dict(name.powers) for name in name_number(abs(value), self.quantities, tolerance))
            names = [one for one in found if len(one) <= 2 or over_averaged(one, self._averages)]
            costs = (cost_of_name(powers, self._averages) for powers in names)
            cost = min(costs, default=nameless(self._exact))
            cost = min(cost, 1.0) if may_scale and self._is_loss_scale(abs(value)) else cost
            self._names[key] = min(cost, nameless(self._exact)) + (1.0 if value < 0 else 0.0)
        return self._names[key]


def _are_apart(design: np.ndarray, rest: np.ndarray, allowed: np.ndarray) -> bool:
    """Whether rows that any constants change alike came out apart, by more than both may be off: each may be near
    enough to a number between them, and none is that of both."""
    alike = (design[:, None] == design).all(axis=-1)
    most = (allowed[:, None] + allowed) * np.maximum(rest[:, None], rest)
    return bool((alike & (np.abs(rest[:, None] - rest) > most)).any())

"""The cheapest set of causes that explains every documented weight, the right ones among them.

Recorded hands do what they document, so a weight is off by loss * product of hands. A cause corrects one factor of it:
a hand that should not have acted ("never"), that should have acted once ("once"), that should have multiplied by
another constant ("other"), one that others went through and this weight did not ("missing"), an unrecorded one that
differs from what it is for right weights ("elsewhere"), or the loss, which should carry another constant. Costs are
description lengths: a cause, and the name of each number that it needs. A right weight is a row like any other, so a
cause that would make it wrong costs a second one that mends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import log2, prod
from statistics import median

import numpy as np

from gradcheck_dist.diagnosis.account import Hand
from gradcheck_dist.diagnosis.causes import (
    ALIKE,
    CAUSE,
    COARSE,
    GAP,
    LOSS,
    LOSS_SCALE,
    MISSING,
    MOST_EDITS,
    MOST_RIVALS,
    NAMELESS,
    OTHER,
    OTHER_GAP,
    RANKS,
    SCHEDULE,
    TIE,
    Edit,
    Explanation,
    Powers,
    Rival,
    Row,
    add,
    effect,
    same,
)
from gradcheck_dist.diagnosis.factors import name_number


@dataclass
class Search:
    """All explanations of `wrong` rows that leave `right` rows right."""

    wrong: Sequence[Row]
    right: Sequence[Row]
    quantities: Mapping[str, float]
    tied: list[Explanation] = field(default_factory=list)
    _names: dict[tuple[float, float], float] = field(default_factory=dict)

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
        self.edits = [edit for mode in ("never", "once", "missing", "elsewhere") for edit in self._edits(mode)]

    def _edits(self, mode: str) -> Iterator[Edit]:
        """Edits that change something that is wrong."""
        for hand in self.hands:
            edit = (hand, mode)
            if (hand[0] == GAP and mode == "missing") or (hand[0] != GAP and mode == "elsewhere"):
                continue
            if mode == "elsewhere" and not any(hand in row.factors for row in self.right):
                continue
            if mode == "missing" and not (0 < abs(self.factor_of[hand]) != 1):
                continue
            if any(self.effect(row, edit) != 1 for row in self.wrong):
                yield edit

    def effect(self, row: Row, edit: Edit) -> float:
        return effect(row.factors, edit, self.factor_of.get(edit[0], 1.0))

    def best(self) -> list[Explanation]:
        """The cheapest explanation, and rivals that cost little more and fit only because sizes happen to be equal; []
        when none fits."""
        found: list[Explanation] = []
        limit = float("inf")
        for chosen in self._choices():
            base = sum(MISSING if mode in ("missing", "elsewhere") else CAUSE for _, mode in chosen)
            if base > limit + ALIKE:
                continue
            for explanation in self._completed(chosen, base, limit + ALIKE):
                found.append(explanation)
                limit = min(limit, explanation.cost)
        found.sort(key=lambda one: one.cost)
        if min((row.allowed for row in self.wrong), default=0.0) > COARSE:  # numbers so vague speak for no name
            least = min((one.cost - one.names for one in found), default=0.0)
            self.tied = [one for one in found if one.cost - one.names <= least + TIE]
        else:
            self.tied = [one for one in found if one.cost <= limit + TIE]
        if not found:
            return []
        known = [self.powers(found[0])]
        best = found[:1]
        for one in found[1:]:
            powers = self.powers(one)
            if one.cost <= limit + ALIKE and len(best) <= MOST_RIVALS and not any(same(powers, old) for old in known):
                best.append(one)
                known.append(powers)
        return best

    def loss_or_gap(self, chosen: Explanation) -> Hand | None:
        """The hand that nobody recorded and that is to blame as well as the losses: of two that multiply the same
        weights, which of them has the wrong number cannot be told."""
        for other in self.tied:
            if (other.loss is None) != (chosen.loss is None) and len(other.gaps ^ chosen.gaps) == 1:
                (gap,) = other.gaps ^ chosen.gaps
                if (gap in chosen.gaps) == (chosen.loss is None) and other.hands - {gap} == chosen.hands - {gap}:
                    return gap
        return None

    def rivals(self, found: Sequence[Explanation]) -> tuple[Rival, ...]:
        """The explanations behind the first, in words."""
        rivals = []
        for one in found[1:]:
            pairs = zip(self.powers(one), self.powers(found[0]), strict=True)
            powers, against = next(pair for pair in pairs if dict(pair[0]) != dict(pair[1]))
            rivals.append(Rival(self._words(one), tuple(powers.items()), tuple(against.items())))
        return tuple(rivals)

    def _words(self, explanation: Explanation) -> str:
        modes = {"never": "should not act", "once": "should act once only", "missing": "should act here as well",
                 "elsewhere": "should be what it is elsewhere"}  # fmt: skip
        parts = [f"{_name(hand)} {modes[mode]}" for hand, mode in explanation.edits]
        if explanation.loss is not None:
            names = name_number(abs(explanation.loss), self.quantities, 1e-3, max_factors=2)
            parts.append(f"the loss is off by {names[0].expression if names else f'{explanation.loss:.6g}'}")
        parts += [f"{_name(hand)} should multiply by {self.factor_of[hand] / value:.6g}"
                  for hand, value in explanation.others]  # fmt: skip
        return " and ".join(parts)

    def powers(self, explanation: Explanation) -> list[Powers]:
        """What the explanation's factor is made of, for each wrong row; a number that is made of nothing known stands
        under its own name."""
        found: list[Powers] = []
        for row in self.wrong:
            total: dict[str, int] = {}
            for hand, mode in explanation.edits:
                factors = row.factors.get(hand, [])
                if mode == "missing":
                    add(total, self._powers_of(hand), -int(self.effect(row, (hand, mode)) != 1))
                else:
                    acting = factors if mode == "never" else factors[1:]
                    add(total, self._powers_of(hand), sum(factor != 1 for factor in acting))
            if explanation.loss is not None:
                add(total, self._powers_named(explanation.loss), 1)
            for hand, value in explanation.others:
                if hand in row.factors:
                    add(total, self._powers_named(value), 1)
            found.append({name: power for name, power in total.items() if power})
        return found

    def _powers_of(self, hand: Hand) -> Powers:
        """What a recorded hand multiplies by: an average by its group's size, a schedule by its microbatches."""
        kind, op, size, site, constant = hand
        if kind == "ScaleGrads":
            return {"microbatches" if constant == self.quantities.get("microbatches") else str(constant): -1}
        if kind != "Reduce":
            return {f"{kind} {site}": 1}
        named = [name for name in sorted(RANKS - {"world_size"}) if self.quantities.get(name) == size]
        name = named[0] if named else f"group of {size}"
        return {name: 1 if op == "sum" else -1}

    def _powers_named(self, value: float) -> Powers:
        names = name_number(abs(value), self.quantities, max(2 * min(row.exact for row in self.rows), 1e-6),
                            max_factors=2)  # fmt: skip
        return dict(names[0].powers) if names else {f"{value:.6g}": 1}

    def partly(self) -> list[Explanation]:
        """The single cause, or pair of edits, that explains most of what is wrong and harms nothing that is right."""
        harmless = [edit for edit in self.edits if all(self.effect(row, edit) == 1 for row in self.right)]
        found = [Explanation(chosen) for count in (1, 2) for chosen in combinations(harmless, count)]
        known = {hand for row in self.right for hand in row.factors}
        found += [
            Explanation(others=((hand, row.documented),))
            for row in self.wrong
            for hand in row.factors
            if hand not in known and _is_scaling(hand) and row.documented
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
        return abs(row.documented / value - 1) <= 2 * row.allowed

    def _choices(self) -> Iterator[tuple[Edit, ...]]:
        yield ()
        for count in range(1, MOST_EDITS + 1):
            for chosen in combinations(self.edits, count):
                if len({hand for hand, _ in chosen}) == count:
                    yield chosen

    def explained_by_hands(self, most: int) -> bool:
        """Whether a few edits alone explain everything."""
        choices = (chosen for chosen in self._choices() if 0 < len(chosen) <= most)
        return any((rest := self._rest(chosen)) is not None and self._fit(rest, False, ()) == [] for chosen in choices)

    def _completed(self, edits: tuple[Edit, ...], base: float, limit: float) -> Iterator[Explanation]:
        """With as few constants as it takes: none, or else the loss's, one hand's, both, or two hands'."""
        rest = self._rest(edits)
        if rest is None:
            return
        if self._fit(rest, False, ()) == []:
            yield Explanation(edits, cost=base)
            return
        edited = {hand for hand, _ in edits}
        free = [hand for hand in self.hands if hand not in edited and _is_scaling(hand) and self.factor_of[hand]]
        sets: list[tuple[bool, tuple[Hand, ...]]] = [(True, ())]
        sets += [(with_loss, (hand,)) for with_loss in (False, True) for hand in free]
        sets += [(False, pair) for pair in combinations(free, 2)]
        for with_loss, hands in sets:
            least = base + (LOSS + 1 if with_loss else 0) + OTHER_GAP * len(hands)
            constants = self._fit(rest, with_loss, hands) if least <= limit else None
            if constants is None:
                continue
            cost, named, loss = base, 0.0, constants[0] if with_loss else None
            if loss is not None:
                cost, named = cost + LOSS, self._name_cost(loss)
            others = tuple(zip(hands, constants[int(with_loss) :], strict=True))
            for hand, value in others:
                cost += OTHER_GAP if hand[0] == GAP else OTHER
                named += self.divisor_cost(hand, value / self.factor_of[hand])
            yield Explanation(edits, loss, others, cost + named, named)

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
            return [] if np.all(np.abs(rest - 1) <= allowed) else None
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
        constants = np.exp(solution)
        if with_loss:
            constants[0] *= sign
        return None if np.any(np.abs(constants - 1) <= allowed.min()) else [float(value) for value in constants]

    def divisor_cost(self, hand: Hand, divisor: float) -> float:
        """How natural it would be for a hand to divide by this number: reductions divide by ranks, schedules by
        microbatches."""
        if abs(divisor - 1) <= 1e-6:
            return 0.0
        if hand[0] == GAP and self._is_loss_scale(divisor):
            return 1.0
        meant = SCHEDULE if hand[0] == "ScaleGrads" else RANKS
        quantities = {name: value for name, value in self.quantities.items() if name in meant and value > 1}
        tolerance = max(1e-3, *(2 * row.exact for row in self.wrong))
        names = name_number(divisor, quantities, min(tolerance, COARSE), max_factors=3)
        fitting = [name for name in names if all(power == 1 for _, power in name.powers)]
        return min((0.5 + 0.5 * len(name.powers) for name in fitting), default=NAMELESS)

    def _is_loss_scale(self, value: float) -> bool:
        """Whether this is a loss scale that nobody took away again, as far as was recorded."""
        exponent = log2(value) if value > 0 else 0.0
        unscaled = any(known[0] == "AmpUnscale" for known in self.hands)
        return not unscaled and exponent >= LOSS_SCALE and abs(exponent - round(exponent)) < 1e-2

    def _name_cost(self, value: float) -> float:
        tolerance = min(max(2 * min(row.exact for row in self.rows), 1e-6), COARSE)
        key = (value, tolerance)
        if key not in self._names:
            names = name_number(abs(value), self.quantities, tolerance, max_factors=2)
            cost = min((sum(abs(power) for _, power in name.powers) + 0.5 * (len(name.powers) - 1) for name in names),
                       default=NAMELESS)  # fmt: skip
            cost = min(cost, 1.0) if self._is_loss_scale(abs(value)) else cost
            self._names[key] = min(cost, NAMELESS) + (1.0 if value < 0 else 0.0)
        return self._names[key]


def _name(hand: Hand) -> str:
    kind, op, size, site, _ = hand
    if kind == GAP:
        return f"the unrecorded change behind the {op} event"
    what = f"the {op} over {size} ranks" if kind == "Reduce" else f"the {kind} event"
    return f"{what} at {site[0].rpartition('/')[2]}:{site[1]}" if isinstance(site, tuple) else what


def _is_scaling(hand: Hand) -> bool:
    """Whether a hand multiplies by a constant of its own that could be another one."""
    return hand[0] in ("Reduce", "ScaleGrads", "AmpUnscale", GAP)

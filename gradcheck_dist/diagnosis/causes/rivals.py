"""Explanations that fit as well as the chosen one: what their factors are made of, and how they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradcheck_dist.diagnosis.causes.account import Hand
from gradcheck_dist.diagnosis.causes.vocabulary import GAP, RANKS, Explanation, Powers, Rival, Row, add, effect
from gradcheck_dist.diagnosis.weights.factors import name_number


@dataclass(frozen=True)
class Formulas:
    """What explanations make of each wrong row, in degrees and counts. `factor_of` is what each hand does; `exact` to
    how many digits numbers are known, relative."""

    wrong: Sequence[Row]
    factor_of: Mapping[Hand, float]
    quantities: Mapping[str, float]
    exact: float

    def rivals(self, found: Sequence[Explanation]) -> tuple[Rival, ...]:
        """The explanations behind the first that ask for something else, in words."""
        rivals = []
        for one in found[1:]:
            if self._asked(one) == self._asked(found[0]):
                continue
            pairs = zip(self.powers(one), self.powers(found[0]), strict=True)
            powers, against = next(pair for pair in pairs if dict(pair[0]) != dict(pair[1]))
            rivals.append(Rival(self._words(one), tuple(powers.items()), tuple(against.items())))
        return tuple(rivals)

    def _asked(self, explanation: Explanation) -> set[tuple[Hand | None, str, str]]:
        """What each hand, and the losses, should have done: an average that should not act should multiply by 1."""
        asked: set[tuple[Hand | None, str, str]] = set()
        for hand, mode, reference in explanation.edits:
            asked.add((hand, mode, "" if mode in ("never", "once") else f"{reference:.6g}"))
        if explanation.loss is not None:
            asked.add((None, "loss", f"{explanation.loss:.6g}"))
        for hand, value in explanation.others:
            should = f"{self.factor_of[hand] / value:.6g}"
            asked.add((hand, "never", "") if should == "1" else (hand, "multiply", should))
        return asked

    def _words(self, explanation: Explanation) -> str:
        modes = {"never": "should not act", "once": "should act once only", "missing": "should act here as well",
                 "elsewhere": "should be what it is elsewhere"}  # fmt: skip
        modes["clipped"] = "is a clip and divides besides"
        parts = [f"{_name(hand)} {modes[mode]}" for hand, mode, _ in explanation.edits]
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
            for edit in explanation.edits:
                hand, mode, _ = edit
                factors = row.factors.get(hand, [])
                if mode == "clipped":
                    add(total, self._powers_named(1 / edit.reference), 1)
                if mode == "missing":
                    add(total, self._powers_of(hand), -int(effect(row.factors, edit) != 1))
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
        names = name_number(abs(value), self.quantities, self.exact, max_factors=2)
        return dict(names[0].powers) if names else {f"{value:.6g}": 1}


def _name(hand: Hand) -> str:
    kind, op, size, site, _ = hand
    if kind == GAP:
        return f"the unrecorded change after the {op} event"
    what = f"the {op} over {size} ranks" if kind == "Reduce" else f"the {kind} event"
    return f"{what} at {site[0].rpartition('/')[2]}:{site[1]}" if isinstance(site, tuple) else what

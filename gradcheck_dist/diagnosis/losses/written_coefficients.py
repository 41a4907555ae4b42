"""Coefficients of losses that count nothing, by what is written before them: `0.1 * loss`, `loss * self.mse_weight`.

What multiplies every pass's loss on one line, and is called a weight there, is taken for the loss's coefficient: the
step is judged as if it did not stand there. A plain number may be one too, and hides no other fault then; where nothing
else is wrong, it may be wrong itself. What is as large as a number of ranks or passes, or one over it, may be a
division that somebody wrote out, and stays. Only `0.5 *`, of a squared error, is taken out there, too: what is wrong
with it and without it is wrong, and what is right with one of the two is no fault that a plain number could hide.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

import msgspec

from gradcheck_dist.diagnosis.weights.degrees import is_of_degrees
from gradcheck_dist.diagnosis.weights.named_counts import TIMES, common_numbers, may_be_a_coefficient
from gradcheck_dist.events import LossGradient, LossNumber
from gradcheck_dist.ledger.contributions import Contribution, Contributions

_WEIGHT = re.compile(r"coef|weight|lambda|lmbda|alpha|beta|gamma")
_PLAIN = re.compile(r"[-+*/().\de_ ]+")
_WEIGHED = ("mean_weight", "reduced_weight", "element_min", "element_max")


def written_coefficients(contributions: Contributions) -> list[LossNumber]:
    """The numbers that are coefficients by what is written there, in all passes alike."""
    return [
        number
        for number in common_numbers(contributions)
        if is_called_a_weight(number) or _is_plain(number)
        if not is_of_degrees(abs(number.factor), contributions) or (_is_plain(number) and abs(number.factor) < 1)
    ]


def without(contributions: Contributions, coefficients: list[LossNumber]) -> Contributions:
    """The contributions as if these did not stand before their losses."""
    factor = prod(number.factor for number in coefficients)
    by_key = {
        key: replace(one, gradient=one.gradient and _over(one.gradient, coefficients), weight=_weight(one, factor))
        for key, one in contributions.by_key.items()
    }
    return replace(contributions, by_key=by_key)


def in_words(coefficients: list[LossNumber]) -> str:
    places = ", ".join(f"{number.written} at {number.site.short}" for number in coefficients)
    return f"what multiplies each loss is taken for its coefficient, and the rest is judged: {places}"


def is_called_a_weight(number: LossNumber) -> bool:
    return may_be_a_coefficient(number) and bool(_WEIGHT.search(number.written.lower()))


def _is_plain(number: LossNumber) -> bool:
    return may_be_a_coefficient(number) and bool(_PLAIN.fullmatch(number.written.removeprefix(TIMES)))


def _weight(contribution: Contribution, factor: float) -> float | None:
    """What a token weighs without it; a loss that counts nothing weighs 1 as a whole."""
    counted = contribution.weight is not None and contribution.num_tokens is not None
    return (contribution.weight or 0.0) / factor if counted else contribution.weight


def _over(gradient: LossGradient, coefficients: list[LossNumber]) -> LossGradient:
    factor, num = prod(number.factor for number in coefficients), len(coefficients)
    numbers = [number for number in gradient.numbers or () if number not in coefficients]
    weights = {name: getattr(gradient, name) for name in _WEIGHED}
    fields = {name: weight / factor for name, weight in weights.items() if weight is not None}
    return msgspec.structs.replace(gradient, num_factors=max(gradient.num_factors - num, 0), numbers=numbers, **fields)

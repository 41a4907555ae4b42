"""Passes that a line multiplies by a number each: sources of data, or tasks, with coefficients of their own.

    (0.5 * loss(model, replayed)).backward()
    loss(model, batch).backward()

Where each pass weighs by just this number what a mean over its own tokens does, nothing else divides or multiplies
these losses. Where each source has a line on which its passes begin, in each turn of an accumulation loop, they are
divided by its turns, as passes of one loss would be. They may be meant to add up so, and nothing tells what their
coefficients should come to. A number that follows the tokens of its pass is a share of these and no coefficient, and
what divides is a normaliser.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import product
from math import prod
from operator import and_

from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.elements import MEANS
from gradcheck_dist.diagnosis.losses.several_losses import MEANT, OwnMeans, fits, line_of, own_weights, weigh_as
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.degrees import same
from gradcheck_dist.diagnosis.weights.named_counts import may_be_a_coefficient, numbers_of
from gradcheck_dist.diagnosis.weights.written import is_exactly_written
from gradcheck_dist.events import LossNumber
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.tracks import StepData

Slot = tuple[int, int]
"""An accumulation step and a microbatch."""
DECLARE = "gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., coefficient=...) tells"
OF_MEANS = (
    ". Each pass divides by its own tokens, so that these count alike, however many they are: --objective "
    "microbatch-mean where that is meant"
)


def source_by_source(target: Aim, objective: str, data: StepData, measured: list[Held]) -> OwnMeans | None:
    """What the weights are compared with where passes have unlike coefficients that lines are seen to multiply by, and
    are right as means of their own with these; None where that is not so."""
    if target.relative or fits(measured, target.contributions, target.expected):
        return None
    slots: dict[Slot, list[ContributionKey]] = defaultdict(list)
    for key, count in sorted(target.tokens.items()):
        if count:
            slots[key[1:]].append(key)
    found = {slot: _numbers(target, keys) for slot, keys in slots.items()}
    numbers = {slot: prod(number.factor for number in of_slot) for slot, of_slot in found.items()}
    counts = {slot: sum(target.tokens[key] for key in keys) for slot, keys in slots.items()}
    alike = all(same(number, next(iter(numbers.values()))) for number in numbers.values())
    if alike or not all(is_exactly_written(number) for number in numbers.values()) or _follow(numbers, counts):
        return None
    by_line = _by_line(target, slots, numbers)
    readings = [
        (sources is by_line, meant, _scaled(target, meant, sources, slots, numbers))
        for sources, meant in product((by_line, [[slot] for slot in slots]), dict.fromkeys((objective, MEANS)))
        if sources
    ]
    right = [one for one in readings if fits(measured, target.contributions, one[-1])]
    # Something else may be wrong with gradients behind such losses.
    right = right or [one for one in readings if one[0] and weigh_as(one[-1], target.contributions)]
    if not right:
        return None
    _, meant, scaled = right[0]
    lines = dict.fromkeys(f"{one.site.short} ({one.written})" for of_slot in found.values() for one in of_slot)
    shown = " and ".join(f"x {number:.4g}" for number in dict.fromkeys(numbers.values()))
    reason = (
        f"passes weigh {shown} of a mean over their own tokens, as {' and '.join(lines)} multiplies their losses: "
        f"sources of data, or tasks, that have a coefficient each and add up. {MEANT.capitalize()} is not known. "
        f"{DECLARE}{'' if meant == objective else OF_MEANS}"
    )
    return OwnMeans(replace(target, expected=target.filled(scaled)), reasons=[reason])


def _scaled(
    target: Aim,
    objective: str,
    sources: Sequence[Sequence[Slot]],
    slots: Mapping[Slot, Sequence[ContributionKey]],
    numbers: Mapping[Slot, float],
) -> dict[ContributionKey, Fraction]:
    """What passes weigh as means of their source, times the number before each."""
    own = own_weights(target, objective, [[key for slot in source for key in slots[slot]] for source in sources])
    return {key: weight * Fraction(numbers[key[1:]]) for key, weight in own.items()}


def _by_line(
    target: Aim, slots: Mapping[Slot, Sequence[ContributionKey]], numbers: Mapping[Slot, float]
) -> list[list[Slot]]:
    """The passes of each source where one is several passes, which begin on a line that no other has, with one number;
    none where that is not so. What divides by their number is right then."""
    by_key = target.contributions.by_key
    found: dict[tuple[float, str], list[Slot]] = defaultdict(list)
    for slot, keys in slots.items():
        (line, *others) = {line_of(by_key[key].gradient) for key in keys}
        if others or not line:
            return []
        found[numbers[slot], line].append(slot)
    lines = {line for _, line in found}
    return list(found.values()) if len(lines) == len(found) < len(slots) else []


def _numbers(target: Aim, keys: list[ContributionKey]) -> list[LossNumber]:
    """What lines multiply all these losses by that may be coefficients."""
    of_each = [set(numbers_of(target.contributions.by_key[key])) for key in keys]
    return [number for number in sorted(reduce(and_, of_each), key=repr) if may_be_a_coefficient(number)]


def _follow(numbers: dict[Slot, float], counts: dict[Slot, int]) -> bool:
    """Whether one power of its tokens makes each pass's number."""
    made = [[numbers[slot] * float(counts[slot]) ** power for slot in numbers] for power in (-1, 1)]
    return any(all(same(one, values[0]) for one in values) for values in made)

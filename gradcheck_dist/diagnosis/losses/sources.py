"""Passes that a line multiplies by a number each: sources of data, or tasks, with coefficients of their own.

    (0.5 * loss(model, replayed)).backward()
    loss(model, batch).backward()

Where each pass weighs by just this number what a mean over its own tokens does, nothing else divides or multiplies
these losses. They may be meant to add up so, and nothing tells what their coefficients should come to. A number that
follows the tokens of its pass is a share of these and no coefficient, and what divides is a normaliser.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from math import prod
from operator import and_

from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.several_losses import MEANT, SAME, OwnMeans, fits, own_weights, usual
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.degrees import same
from gradcheck_dist.diagnosis.weights.named_counts import may_be_a_coefficient, numbers_of
from gradcheck_dist.diagnosis.weights.written import is_exactly_written
from gradcheck_dist.events import LossNumber
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.tracks import StepData

Slot = tuple[int, int]
"""An accumulation step and a microbatch."""


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
    own = own_weights(target, objective, slots.values())
    shares = {slot: usual(measured, target.contributions, own, keys) for slot, keys in slots.items()}
    if not all(same(shares[slot], numbers[slot], SAME) for slot in slots):
        return None
    scaled = target.filled({key: own[key] * Fraction(numbers[slot]) for slot, keys in slots.items() for key in keys})
    if not fits(measured, target.contributions, scaled):
        return None
    lines = dict.fromkeys(f"{one.site.short} ({one.written})" for of_slot in found.values() for one in of_slot)
    shown = " and ".join(f"x {number:.4g}" for number in dict.fromkeys(numbers.values()))
    reason = (
        f"passes weigh {shown} of a mean over their own tokens, as {' and '.join(lines)} multiplies their losses: "
        f"sources of data, or tasks, that have a coefficient each and add up. {MEANT.capitalize()} is not known. "
        "gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., coefficient=...) tells"
    )
    return OwnMeans(replace(target, expected=scaled), reasons=[reason])


def _numbers(target: Aim, keys: list[ContributionKey]) -> list[LossNumber]:
    """What lines multiply all these losses by that may be coefficients."""
    of_each = [set(numbers_of(target.contributions.by_key[key])) for key in keys]
    return [number for number in sorted(reduce(and_, of_each), key=repr) if may_be_a_coefficient(number)]


def _follow(numbers: dict[Slot, float], counts: dict[Slot, int]) -> bool:
    """Whether one power of its tokens makes each pass's number."""
    made = [[numbers[slot] * float(counts[slot]) ** power for slot in numbers] for power in (-1, 1)]
    return any(all(same(one, values[0]) for one in values) for values in made)

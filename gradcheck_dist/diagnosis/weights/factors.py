"""Naming a number: which product of degrees and counts is it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product
from math import comb, prod

import numpy as np

EXPONENTS = (-2, -1, 1, 2)
MAX_DENOMINATOR = 4096
SURE = 0.02
"""What chance would make more often than this convicts nobody."""
BY_CHANCE = 0.25
"""A kind of name is not tried where so many of its kind would hit a number by chance."""
RATIO_BY_CHANCE = 0.05
"""As BY_CHANCE, of names that multiply by one quantity and divide by another, which few faults do."""
TOKENS = "num_tokens"
SMALL = 16
TWICE = 1.5
"""What the square of a quantity costs beside others of its cost."""
SPAN = 9.0
"""The logarithms of factors that occur lie within this width: 1/90 to 90."""
Powers = tuple[tuple[str, int], ...]
"""Quantities with the powers to which they are multiplied."""


@dataclass(frozen=True)
class Name:
    """One way to write a number as a product of powers of quantities. Lower `cost` is simpler."""

    expression: str
    value: float
    powers: Powers
    cost: float


def exact_fraction(value: float, tolerance: float) -> str | None:
    """The simplest rational within a relative tolerance, as "1/4" or "2"; None when there is no small one.

    A rational counts only when its denominator is so small that hitting it by chance is unlikely.
    """
    if value == 0:
        return "0"
    tolerance = max(tolerance, 1e-9)
    limit = int(min(MAX_DENOMINATOR, max(4.0, (0.01 / tolerance) ** 0.5)))
    for denominator in range(1, limit + 1):
        numerator = round(value * denominator)
        if numerator and abs(numerator / denominator - value) <= tolerance * abs(value):
            return str(Fraction(numerator, denominator))
    return None


def expression_of(powers: Powers) -> str:
    """ "dp_replicate * tp / accumulation_steps^2" style text of a product of powers."""
    over = [_power(name, exponent) for name, exponent in powers if exponent > 0]
    under = [_power(name, -exponent) for name, exponent in powers if exponent < 0]
    top = " * ".join(over) or "1"
    if not under:
        return top
    return f"{top}/{under[0]}" if len(under) == 1 else f"{top}/({' * '.join(under)})"


def has_name(expression: str | None) -> bool:
    """Whether degrees, counts and whole numbers alone make up a factor's expression."""
    return expression is not None and "." not in expression


def _power(name: str, exponent: int) -> str:
    return name if exponent == 1 else f"{name}^{exponent}"


def name_number(
    value: float,
    quantities: Mapping[str, float],
    tolerance: float,
    *,
    near: frozenset[str] = frozenset(),
    max_factors: int = 3,
) -> list[Name]:
    """All products of powers of quantities that equal `value`, simplest first.

    Args:
        value: a positive number; quantities equal to 1 cannot explain anything and are left out.
        tolerance: relative.
        near: names that belong to the event in question; a name made of them is preferred.

    Returns:
        At most 8 names; [] when nothing fits, or when the tolerance is so wide that names fit by chance. Names that
        differ only in which of two equal quantities they use are all returned: the caller must say that they cannot be
        told apart.
    """
    if value <= 0:
        return []
    usable = {name: number for name, number in quantities.items() if number > 0 and abs(number - 1.0) > 1e-12}
    if abs(value - 1.0) <= tolerance:
        return [Name("1", 1.0, (), 0.0)]
    found: list[Name] = []
    for count in range(1, max_factors + 1):
        # Simple powers first: the wider the tolerance, the fewer kinds of names mean anything.
        for most in (1, 2):
            if most == 2 and any(len(name.powers) < count for name in found):
                break  # beside the square of one quantity, two that are counted once each are all that is looked for
            num_choices = comb(len(usable), count) * (2**count if most == 1 else 4**count - 2**count)
            if num_choices * 2 * tolerance / SPAN > BY_CHANCE and (count, most) != (1, 1):
                return sorted(found, key=_simplest)[:8]
            ratios = num_choices * 2 * tolerance / SPAN <= RATIO_BY_CHANCE
            choices, numbers = _products(tuple(sorted(usable.items())), count, most)
            for index in np.flatnonzero(np.abs(numbers / value - 1.0) <= tolerance):
                powers, number = choices[index], float(numbers[index])
                is_ratio = min(power for _, power in powers) < 0 < max(power for _, power in powers)
                if _coincides(powers, number) or (is_ratio and not ratios):
                    continue
                far = sum(name not in near for name, _ in powers)
                miss = abs(number / value - 1.0) / max(tolerance, 1e-12)
                cost = sum(abs(power) for _, power in powers) + 0.5 * (count - 1) + 0.4 * far + 0.3 * miss**2
                found.append(Name(expression_of(powers), number, powers, cost))
        # The square of one of the event's own degrees would stand before a product of two of them.
        squared = any(abs(power) > 1 and part in near for name in found for part, power in name.powers)
        if squared and count == 1 and len(near & usable.keys()) > 1:
            continue
        if any(count > 1 or abs(power) == 1 for name in found for _, power in name.powers):
            break
    return sorted(found, key=_simplest)[:8]


def _simplest(name: Name) -> tuple[float, str]:
    """Two hands that each act once too often are likelier than one that acts twice too often."""
    return name.cost + sum(TWICE for _, power in name.powers if abs(power) > 1), name.expression


def _coincides(powers: tuple[tuple[str, int], ...], number: float) -> bool:
    """Whether a product of a token count with squares is a fraction of small numbers, which few tokens make up easily:
    4/12 is 1/3. Or one with the squares of two degrees, as padded tokens are where all of these are powers of two."""
    squares = sum(abs(power) > 1 for _, power in powers)
    if not squares or not any(name == TOKENS for name, _ in powers):
        return False
    if squares > 1:
        return True
    fraction = Fraction(number).limit_denominator(SMALL)
    return fraction.numerator <= SMALL and abs(float(fraction) / number - 1) < 1e-9


def chance(name: Name, quantities: Mapping[str, float], tolerance: float) -> float:
    """How probable it is that some name as simple as this one equals a number of no meaning, known to a tolerance."""
    usable = sum(number > 0 and abs(number - 1.0) > 1e-12 for number in quantities.values())
    count = len(name.powers)
    simple = all(abs(power) == 1 for _, power in name.powers)
    num_choices = comb(usable, count) * (2**count if simple else 4**count - 2**count)
    return float(num_choices * 2 * tolerance / SPAN)


@lru_cache(maxsize=512)
def _products(
    usable: tuple[tuple[str, float], ...], count: int, most: int
) -> tuple[list[tuple[tuple[str, int], ...]], np.ndarray]:
    """All products of `count` quantities with exponents up to `most`, at least one as high: their powers and values."""
    choices = [
        tuple(zip(names, powers, strict=True))
        for names in combinations([name for name, _ in usable], count)
        for powers in product(EXPONENTS, repeat=count)
        if max(map(abs, powers)) == most
    ]
    value_of = dict(usable)
    return choices, np.array([prod(value_of[name] ** power for name, power in powers) for powers in choices])

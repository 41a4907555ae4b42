"""Measured numbers: which are one and the same, and which somebody wrote into a program."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import isfinite, log2

import numpy as np

from gradcheck_dist.diagnosis.weights.factors import exact_fraction, name_number
from gradcheck_dist.events import SCALED, Event, GradWrite
from gradcheck_dist.ledger.tracks import StepData

Measured = tuple[float, float]
"""(value, relative tolerance)"""
EXACT = sys.float_info.epsilon
MOST_WRITTEN = 2.0**24
MOST_IN_FLOAT32 = 2.0**12
"""Beyond it a computed number of float32 is one over a whole one too often."""
VAGUE = 1e-3
"""With a wider tolerance than this every number is near to one that people write."""
SIMPLE = 3.5
"""Cost of a name below which chance does not make it."""
LEAST_POWER = 5
"""Smaller powers of two are numbers of ranks or accumulation steps as well as loss scales."""
DIGITS = ((1, 5e-3), (2, 5e-4), (3, 5e-5))
"""How many digits people write, and the tolerance up to which chance hits such a number in one of ten cases at most."""


def distinct(factors: list[Measured]) -> list[Measured]:
    """Values that differ by more than their tolerances, each the best measured one of its kind."""
    found: list[Measured] = []
    for value, tolerance in sorted(factors, key=lambda item: item[1]):
        if not any(same((value, tolerance), other) for other in found):
            found.append((value, tolerance))
    return found


def same(one: Measured, other: Measured) -> bool:
    return abs(one[0] - other[0]) <= 2 * (one[1] + other[1]) * max(abs(one[0]), abs(other[0]), 1e-12)


def is_written(value: float, tolerance: float, quantities: Mapping[str, float]) -> bool:
    """Whether somebody wrote this number, or made it of degrees and counts; chance is left little room."""
    size = abs(value)
    for digits, widest in DIGITS:
        if tolerance <= widest and abs(size / float(f"{size:.{digits - 1}e}") - 1) <= tolerance:
            return True
    if tolerance <= VAGUE and exact_fraction(size, tolerance) is not None:
        return True
    return any(name.cost < SIMPLE for name in name_number(size, quantities, max(tolerance, 1e-6)))


def is_exactly_written(factor: float | None) -> bool:
    """Whether a factor that was read from the program's own call, to all its digits, is one of few digits or one over a
    whole number: what is computed from gradients is never that."""
    if not factor or not isfinite(factor):
        return False
    size = abs(factor)
    whole = [one for one in (size, 1 / size) if one <= MOST_WRITTEN and abs(one - round(one)) <= 4 * EXACT * one]
    return bool(whole) or float(f"{size:.2e}") == size or _is_rounded(size)


def _is_rounded(size: float) -> bool:
    """Whether it is float32's nearest to such a number (a tensor's). Of computed ones fewer than one in 10^4 is."""
    if not np.finfo(np.float32).tiny < size < MOST_IN_FLOAT32 or np.float32(size) != size:
        return False
    near = [float(f"{size:.2e}"), *(1 / round(1 / size) for _ in range(1 / MOST_IN_FLOAT32 < size < 1))]
    return any(np.float32(one) == size for one in near)


def number_of_line(event: Event) -> float | None:
    """What a line of the trainer's own multiplies gradients by, where that is a number that somebody wrote."""
    if not isinstance(event, GradWrite) or event.op != SCALED or event.params is None or event.site is None:
        return None
    return event.factor if is_exactly_written(event.factor) else None


def scale_of(event: Event) -> float | None:
    """The loss scale that a line of the trainer's own takes out of gradients; None where it is none."""
    if not isinstance(event, GradWrite) or event.params is None or not event.factor or not 0 < event.factor < 1:
        return None
    power = round(-log2(event.factor))
    return 2.0**power if power >= LEAST_POWER and abs(event.factor * 2.0**power - 1) < 1e-6 else None


def scales_by_hand(data: StepData) -> set[float]:
    """What may be loss scales that lines of the trainer's own take out of gradients in a step."""
    return {scale for events in data.events.values() for event in events if (scale := scale_of(event)) is not None}

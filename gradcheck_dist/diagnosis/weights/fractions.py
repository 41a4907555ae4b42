"""Measured numbers as fractions that people write."""

from __future__ import annotations

from fractions import Fraction

EXACT = 1e-9
"""How near, relative, a fraction has to be."""


def fraction_of(value: float, largest: int = 10**9) -> Fraction:
    """The fraction with a denominator up to `largest` that a number is; where none is near, all of its digits: next to
    nothing (a loss that only keeps a graph alive, a loss scale that is taken out twice) is no zero."""
    exact = Fraction(value)
    simple = exact.limit_denominator(largest)
    return simple if abs(simple - exact) <= EXACT * abs(exact) else exact

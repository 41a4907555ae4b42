"""Numbers of passes and ranks: what a program divides by, or forgets to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from gradcheck_dist.ledger.contributions import Contributions

SAME = 1e-3
POWERS = (-2, -1, 0, 1, 2)
ONCE = (-1, 0, 1)


def degrees_of(contributions: Contributions) -> set[int]:
    """The numbers of ranks, of passes and of both, also with those passes that are lost."""
    found: set[int] = set()
    for keys in (contributions.by_key.keys(), contributions.by_key.keys() | contributions.lost):
        found |= {len({key[0] for key in keys}), len({key[1:] for key in keys}), len(keys)}
    return found


def is_of_degrees(
    number: float, contributions: Contributions, tolerance: float = SAME, powers_of: Sequence[int] = POWERS
) -> bool:
    """Whether a number is a product of such numbers or of one over them, each at most twice. `tolerance`: relative."""
    degrees = sorted(degrees_of(contributions) - {1})
    for powers in product(powers_of, repeat=len(degrees)):
        found = 1.0
        for degree, power in zip(degrees, powers, strict=True):
            found *= float(degree) ** power
        if same(found, number, tolerance):
            return True
    return False


def same(one: float, other: float, tolerance: float = SAME) -> bool:
    """Whether two numbers are one that was written, to rounding."""
    return abs(one - other) <= tolerance * max(abs(one), abs(other))

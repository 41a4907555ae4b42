"""Losses whose gradient was rounded to half precision on its way to them, though they are of another dtype.

    loss = (loss_sum.half() / num_tokens).float()

What is left of the right number is known to the last digit: it is that number, rounded.
"""

from __future__ import annotations

from math import frexp, isfinite

import numpy as np

from gradcheck_dist.ledger.solve import EPSILON

FARTHEST = EPSILON["bfloat16"]
"""Relative; numbers further apart are no rounding of one another."""
WRITTEN = 16
"""Up to so much, times a power of two, a number is one that a program has: ranks over a count that is such a power."""


def rounded_to(right: float, found: float, num_tokens: int) -> float:
    """The relative spacing of the half precision to which the right weight of a loss's token was rounded, as a token's
    or as that of a mean over `num_tokens`; 0 where `found` is no such number."""
    if found == right or not abs(found - right) <= FARTHEST * abs(right):
        return 0.0
    for times in {1, num_tokens}:
        for dtype, rounded in (("float16", _float16(right * times)), ("bfloat16", _bfloat16(right * times))):
            if not isfinite(rounded):  # half precision ends there
                continue
            if abs(rounded - found * times) <= EPSILON["float32"] * abs(rounded) and _odd_part(rounded) > WRITTEN:
                return EPSILON[dtype]
    return 0.0


def _odd_part(value: float) -> int:
    """What is left of a number of half precision without powers of two."""
    left = abs(int(frexp(value)[0] * 2**24))
    return left // (left & -left) if left else 0


def _float16(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float16(value))


def _bfloat16(value: float) -> float:
    """Rounded to the nearest, to even where two are as near."""
    with np.errstate(over="ignore", under="ignore"):
        bits = int(np.float32(value).view(np.uint32))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))

"""Optimizer steps as people write them."""

from __future__ import annotations

import sys

from gradcheck_dist.errors import GradcheckError


def parse_steps(text: str | None, *, option: str = "--steps") -> range | None:
    """The steps that "A:B" names; either end may be left out, and "A" alone is one step.

    Raises:
        GradcheckError: E712 it is none of these.
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first or not colon else 0
        high = (int(last) if last else sys.maxsize) if colon else low + 1
    except ValueError:
        low, high = 0, 0
    if not 0 <= low < high:
        raise GradcheckError(
            f"{option} is {text!r}; legal values are A:B with 0 <= A < B, A: or :B, or one step A. Try 0:1.",
            code="E712",
        )
    return range(low, high)

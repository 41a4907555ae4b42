"""Optimizer steps as people write them."""

from __future__ import annotations

import sys
from collections.abc import Container

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


def end_of(steps: Container[int] | None) -> int | None:
    """The step from which on none of them comes any more; None when there is none, or it is not known."""
    if isinstance(steps, frozenset):
        return max(steps, default=-1) + 1
    if not isinstance(steps, range):
        return getattr(steps, "end", None)
    end = max(steps[0], steps[-1]) + 1 if steps else 0  # its ends alone: "2:" has more steps than can be looked at
    return end if end < sys.maxsize else None

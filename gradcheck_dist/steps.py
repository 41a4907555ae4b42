"""Optimizer steps as people write them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gradcheck_dist.errors import GradcheckError

MAX_RUNS = 8
"""Of steps, that are told one by one."""


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


def ranges(steps: Sequence[int]) -> str:
    """Ascending step numbers in words: "0 to 9, 12"; of many runs only how many steps there are, and where."""
    known = set(steps)
    firsts = [step for step in steps if step - 1 not in known]
    lasts = [step for step in steps if step + 1 not in known]
    runs = [f"{one}" if one == two else f"{one} to {two}" for one, two in zip(firsts, lasts, strict=True)]
    return ", ".join(runs) if len(runs) <= MAX_RUNS else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def steps_in_words(steps: Sequence[int]) -> str:
    """ "step 3", "steps 3 to 5"."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {ranges(steps)}"

"""Optimizer steps as people write them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container

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


def chosen_steps(steps: Container[int] | str | None) -> Container[int] | None:
    """Steps as Python code names them: text such as "0:3" as a range, a collection as a frozenset, the rest as it is.

    Raises:
        GradcheckError: E712 none of these, or a step below 0.
    """
    if steps is None or isinstance(steps, str):
        return parse_steps(steps, option="steps")
    if isinstance(steps, Container) and not isinstance(steps, bytes):
        named = frozenset(steps) if isinstance(steps, Collection) and not isinstance(steps, range) else steps
        if all(type(end) is int and end >= 0 for end in _ends(named) or ()):
            return named
    raise GradcheckError(
        f"steps is {steps!r}; legal values are a range, a collection of step numbers from 0 up, or text such as "
        '"0:3". Try steps=range(3).',
        code="E712",
    )


def first_of(steps: Container[int] | None) -> int:
    """The first of them; 0 where it is not known, or there is none."""
    ends = _ends(steps)
    return min(ends, default=0) if ends is not None else getattr(steps, "first", 0)


def end_of(steps: Container[int] | None) -> int | None:
    """The step from which on none of them comes any more; None when there is none, or it is not known."""
    ends = _ends(steps)
    if ends is None:
        return getattr(steps, "end", None)
    end = max(ends, default=-1) + 1
    return end if end < sys.maxsize else None


def _ends(steps: Container[int] | None) -> Collection[int] | None:
    """Some of them, with the first and the last; None where that is not known. "2:" has too many to look at."""
    if isinstance(steps, range):
        return {steps[0], steps[-1]} if steps else ()
    return steps if isinstance(steps, frozenset) else None

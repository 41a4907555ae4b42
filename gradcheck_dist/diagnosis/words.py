"""Words that every room of the diagnosis uses."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.events import GATHERED, Reduce

SHOWN = 3
OF_THE_DATA = "function of the data, which may be meant"
"""What is said of losses that are scaled by no count."""

BY_HAND = "norm that was used / norm of the gradients"
"""The pattern of a clip by hand that takes a wrong norm, before the number."""


def in_short(names: Sequence[str]) -> str:
    """The first of many names: "a, b, c and 4 more"."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def reduction(event: Reduce) -> str:
    """What reduces: "FSDP reduction", "reduction by Gather"."""
    return f"reduction by {event.hook}" if event.impl == GATHERED else f"{event.impl.upper()} reduction"


def that_write(lines: Sequence[str], to: str) -> str:
    """Which lines change something: "a.py:3 writes to it"."""
    return f"{in_short(lines)} {'writes' if len(lines) == 1 else 'write'} to {to}"

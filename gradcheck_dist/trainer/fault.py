"""What an injectable fault is. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One injectable bug.

    Attributes:
        story: what the author of such a trainer thought, and the weight relative to 1/N that came of it.
        target: the replaced function, as "module:function".
        replacement: what stands in its place.
    """

    name: str
    story: str
    target: str
    replacement: Callable[..., Any]

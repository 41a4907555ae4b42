"""How many backward passes begin in each step, also in those of which nothing else is recorded.

The last window of an epoch is often a short one, and seldom among the recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradcheck_dist.events import Unrecorded

MOST = 64
"""Different numbers of passes that are kept apart; a trainer that has more has no usual one."""


class PassCounts:
    """`begun` are the outermost passes of this step so far."""

    def __init__(self) -> None:
        self.begun = 0
        self._unrecorded: dict[int, tuple[int, int]] = {}  # by number of passes: the first step, how many steps

    def step_over(self, step: int, recorded: bool) -> None:
        """A step has ended. `step`: as the user counts it, from 0."""
        if not recorded and self.begun and (self.begun in self._unrecorded or len(self._unrecorded) < MOST):
            first, num_steps = self._unrecorded.get(self.begun, (step, 0))
            self._unrecorded[self.begun] = (first, num_steps + 1)
        self.begun = 0

    def tell(self, emit: Callable[..., Any]) -> None:
        """Emit what was counted since the last time."""
        unrecorded, self._unrecorded = self._unrecorded, {}
        for num_passes, (first, num_steps) in unrecorded.items():
            emit(Unrecorded, num_passes=num_passes, first_step=first, num_steps=num_steps)

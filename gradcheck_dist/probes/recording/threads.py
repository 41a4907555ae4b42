"""Whether several threads of a process train at once, whose passes and steps cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident

import torch

OUTSIDE = -1
"""What stands for a backward pass where none runs on this thread."""

graph_task = getattr(torch._C, "_current_graph_task_id", lambda: OUTSIDE)


class Threads:
    """Which threads ran backward passes in this step, and what these reached. That they take turns is no matter (a
    pool to which a loop hands each pass)."""

    def __init__(self) -> None:
        self.at_once = False  # from the first sign on
        self._reached: dict[int, list[Iterable[int]]] = {}

    def beside(self, thread: int) -> None:
        """A pass or an optimizer begins while that thread runs a pass; what runs inside of one belongs to it."""
        self.at_once |= get_ident() != thread and graph_task() == OUTSIDE

    def pass_over(self, params: Iterable[int]) -> None:
        """`params` is held until the step is over."""
        self._reached.setdefault(get_ident(), []).append(params)

    def step_begins(self) -> None:
        self._reached.clear()

    def reads(self, params: Iterable[int]) -> None:
        """An optimizer steps where passes of its own thread ran: others that reached nothing of it train, too."""
        if len(self._reached) > 1 and (own := self._reached.get(get_ident())):
            read = set(params)
            apart = [each for each in self._reached.values() if all(map(read.isdisjoint, each))]
            self.at_once |= bool(apart) and not all(map(read.isdisjoint, own))

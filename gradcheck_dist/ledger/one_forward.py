"""Passes of a step that differentiate one forward pass: its losses one by one, and no accumulation steps of their own.

Multi-task trainers take the gradient of each task alone, to project them on one another or to weigh them, and keep the
graph until the last (probes/backward/forwards.py sees that). Together they are what one pass of the sum would be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gradcheck_dist.events import Backward
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, losses_of_rank
from gradcheck_dist.ledger.tracks import Slot, StepData

Forwards = list[list[ContributionKey]]
"""The passes of each forward pass, in the order in which their losses were evaluated."""


def forwards_of(data: StepData, counted: Mapping[ContributionKey, Contribution]) -> Forwards:
    """The forward passes of a step, where each of them is differentiated in as many passes, two at least, and no loss
    twice; none else."""
    found: dict[tuple[int, int, int], list[tuple[int, ContributionKey]]] = defaultdict(list)
    for rank in sorted({one.loss_rank for one in counted.values() if one.loss_rank is not None}):
        losses = losses_of_rank(data.events.get(rank, []))
        first: dict[Slot, int] = {}
        for event in data.events.get(rank, []):
            if isinstance(event, Backward):
                slot = (event.accumulation_step, event.microbatch)
                shared = event.first_of_forward
                first[slot] = event.accumulation_step if shared is None else shared
        for key, one in counted.items():
            if one.loss_rank == rank and key[1:] in first:
                evaluated = min((entry.loss_id for entry, _ in losses.get(key[1:], ())), default=0)
                found[key[0], first[key[1:]], key[2]].append((evaluated, key))
    if sum(map(len, found.values())) < len(counted) or {len(of) for of in found.values()} in (set(), {1}):
        return []
    apart = all(len({loss for loss, _ in of}) == len(of) for of in found.values())
    alike = len({len(of) for of in found.values()}) == 1
    return [[key for _, key in sorted(of)] for of in found.values()] if apart and alike else []

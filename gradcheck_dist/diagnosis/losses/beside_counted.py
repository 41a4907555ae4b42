"""Passes of losses that count no tokens, beside passes of others that do: a task each, with a backward of its own."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.losses.returned import arrived
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import LossGradient
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.tracks import Slot, StepData


def counted_beside(
    data: StepData, contributions: Contributions, measured: Sequence[Held]
) -> frozenset[tuple[int, Slot]]:
    """By rank the passes that count tokens, where others with a loss that counts none are in some gradient as well."""
    coordinate = contributions.coordinate
    others = {
        (coordinate.get(rank, rank), event.accumulation_step, event.microbatch)
        for rank, events in data.events.items()
        for event in events
        if isinstance(event, LossGradient)
    } - contributions.by_key.keys()
    if not others or not others & arrived(measured):
        return frozenset()
    keys = contributions.by_key
    return frozenset((rank, key[1:]) for rank in data.events for key in keys if coordinate.get(rank, rank) == key[0])

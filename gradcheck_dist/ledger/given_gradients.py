"""Steps whose passes all begin with gradients that the program made: each pass counts as one loss of which nothing is
known.

A trainer that combines its losses' gradients before it goes backward (a balancer of losses, a cache of gradients)
gives backward a tensor and its gradient. No loss tells then what a pass should weigh, but what becomes of the gradients
behind it can still be compared between ranks and passes.
"""

from __future__ import annotations

from dataclasses import replace

from gradcheck_dist.events import Backward, Event, HandedOn, Loss, LossGradient
from gradcheck_dist.ledger.contributions import UNKNOWN
from gradcheck_dist.ledger.tracks import StepData

GIVEN = "a gradient that the program gave to backward"
"""The op of such a loss."""


def with_given_gradients(data: StepData) -> StepData:
    """The same step, in which such passes have a loss. Where one rank has a loss, the others' passes may be those of a
    pipeline's earlier stages."""
    if any(isinstance(event, LossGradient | HandedOn) for of_rank in data.events.values() for event in of_rank):
        return data
    passes = {rank: [event for event in of_rank if _accumulates(event)] for rank, of_rank in data.events.items()}
    if len({len(of_rank) for of_rank in passes.values()}) != 1 or not all(passes.values()):
        return data
    events = {
        rank: sorted([*data.events[rank], *(made for one in of_rank for made in _loss(one))], key=lambda one: one.seq)
        for rank, of_rank in passes.items()
    }
    return replace(data, events=events)


def _accumulates(event: Event) -> bool:
    return isinstance(event, Backward) and not event.returned and event.params is not None


def _loss(event: Event) -> list[Event]:
    assert isinstance(event, Backward)
    here = {"seq": event.seq, "t_ns": event.t_ns, "step": event.step, "site": event.site, "loss_id": event.seq}
    slot = {"accumulation_step": event.accumulation_step, "microbatch": event.microbatch}
    return [Loss(**here, op=GIVEN, reduction=UNKNOWN), LossGradient(**here, **slot, weight=1.0)]  # type: ignore[arg-type]

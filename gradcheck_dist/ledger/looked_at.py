"""Gradients that were only looked at: GradNorm asks for those of one layer before it knows a task's coefficient.

One evaluation of a loss is differentiated twice, and the first pass reaches a part only of the parameters of the other,
or hands to the caller (torch.autograd.grad) what the other leaves in `.grad`. It is no contribution of its own; were it
put into `.grad` all the same, the other's weights would show it. Nor is a pass that reaches no parameter: gradients of
inputs, for saliency or an adversary, in between.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import msgspec

from gradcheck_dist.events import Backward, Event, LossGradient, RootValue, StageGradient
from gradcheck_dist.ledger.tracks import Slot, StepData


def without_looks(data: StepData) -> StepData:
    """The same step without the passes that only looked."""
    data = _without_inputs(data)
    looks = {(rank, slot) for rank, events in data.events.items() for slot in _looks(data, rank, events)}
    if not looks:
        return data
    tracks = {
        key: {
            rank: replace(
                track, leaves={slot: leaf for slot, leaf in track.leaves.items() if (rank, slot) not in looks}
            )
            for rank, track in of_rank.items()
        }
        for key, of_rank in data.tracks.items()
    }
    return replace(without_losses_of(data, looks), tracks=tracks)


def without_losses_of(data: StepData, passes: Set[tuple[int, Slot]]) -> StepData:
    """The same step without the losses of some passes of ranks. What these left in gradients stays known as theirs."""
    events = {
        rank: [event for event in of_rank if not (isinstance(event, LossGradient) and (rank, _slot(event)) in passes)]
        for rank, of_rank in data.events.items()
    }
    return replace(data, events=events)


def _without_inputs(data: StepData) -> StepData:
    """The same step without the losses of passes that reached no parameter, where others of their rank did. The next
    pass that reaches one has their slot, and begins behind them."""
    events: dict[int, list[Event]] = {}
    for rank, of_rank in data.events.items():
        begins: dict[Slot, int] = {}
        for event in of_rank:
            if isinstance(event, Backward):
                begins[_slot(event)] = min(event.seq, begins.get(_slot(event), event.seq))
        inside = {
            _slot(event)
            for event in of_rank
            if isinstance(event, LossGradient) and event.seq > begins.get(_slot(event), event.seq)
        }
        events[rank] = [
            event
            for event in of_rank
            if not isinstance(event, LossGradient)
            or not begins
            or (_slot(event) in begins and (_slot(event) not in inside or event.seq > begins[_slot(event)]))
        ]
    if all(len(events[rank]) == len(of_rank) for rank, of_rank in data.events.items()):
        return data
    return replace(data, events={rank: _sent_early(of_rank, events[rank]) for rank, of_rank in data.events.items()})


def _sent_early(every: list[Event], left: list[Event]) -> list[Event]:
    """Events without the losses of passes for inputs. What such a pass sent to another stage belongs to the pass that
    differentiates the same loss for parameters later (zero bubble by hand)."""
    slots = {event.loss_id: _slot(event) for event in left if isinstance(event, LossGradient)}
    kept = {event.seq for event in left if isinstance(event, LossGradient)}
    moved: dict[int, Event] = {}
    own: Slot | None = None
    for event in every:
        if isinstance(event, LossGradient):
            own = None if event.seq in kept else slots.get(event.loss_id)
        elif isinstance(event, Backward | RootValue):
            own = None
        elif isinstance(event, StageGradient) and own is not None:
            moved[event.seq] = msgspec.structs.replace(event, accumulation_step=own[0], microbatch=own[1])
    return [moved.get(event.seq, event) for event in left]


def _slot(event: LossGradient | Backward) -> Slot:
    return (event.accumulation_step, event.microbatch)


def _looks(data: StepData, rank: int, events: list[Event]) -> list[Slot]:
    losses: dict[Slot, set[int]] = {}
    for event in events:
        if isinstance(event, LossGradient):
            losses.setdefault(_slot(event), set()).add(event.loss_id)
    of_loss: dict[int, int] = {}
    for ids in losses.values():
        for loss_id in ids:
            of_loss[loss_id] = of_loss.get(loss_id, 0) + 1
    if all(count < 2 for count in of_loss.values()):
        return []
    reached = {
        _slot(event): set(data.params_of(rank, event.params))
        for event in events
        if isinstance(event, Backward) and event.params is not None
    }
    returned = {_slot(event) for event in events if isinstance(event, Backward) and event.returned}

    def looks(one: Slot, other: Slot) -> bool:
        own, others = reached.get(one, set()), reached.get(other, set())
        handed_over = one in returned and other not in returned
        return losses[one] <= losses[other] and (own < others or (handed_over and own <= others))

    return [one for one in losses if any(looks(one, other) for other in losses)]

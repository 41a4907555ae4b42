"""Gradients that were only looked at: GradNorm asks for those of one layer before it knows a task's coefficient.

One evaluation of a loss is differentiated twice, and the first pass reaches a part only of the parameters of the other,
or hands to the caller (torch.autograd.grad) what the other leaves in `.grad`; so may another evaluation of the same
batch. It is no contribution of its own; were it put into `.grad` all the same, the other's weights would show it. Nor
is a pass that reaches no parameter: gradients of inputs, for saliency or an adversary, in between.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import msgspec
import numpy as np

from gradcheck_dist.events import Backward, Event, Loss, LossGradient, RootValue, StageGradient
from gradcheck_dist.ledger.tracks import Slot, StepData

ALIKE = 1e-6
"""Relative; how far two gradients of one direction are from being parallel, at most."""


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
    returned = {_slot(event) for event in events if isinstance(event, Backward) and event.returned}
    if not returned and all(count < 2 for count in of_loss.values()):
        return []
    reached = {
        _slot(event): set(data.params_of(rank, event.params))
        for event in events
        if isinstance(event, Backward) and event.params is not None
    }
    hashes = {event.loss_id: event.label_hash for event in events if isinstance(event, Loss)}
    labels = {slot: {hashes.get(loss_id) for loss_id in ids} for slot, ids in losses.items()}

    def looks(one: Slot, other: Slot) -> bool:
        own, others = reached.get(one, set()), reached.get(other, set())
        handed_over = one in returned and other not in returned
        if losses[one] <= losses[other]:
            return own < others or (handed_over and own <= others)
        again = handed_over and None not in labels[one] and labels[one] == labels[other] and own <= others
        return again and _brings_the_same(data, rank, own, one, other)

    return [one for one in losses if any(looks(one, other) for other in losses)]


def _brings_the_same(data: StepData, rank: int, params: set[int], one: Slot, other: Slot) -> bool:
    """Whether two evaluations of one batch left some parameters gradients of one direction: what was read of them is
    both, or either, and no measurement tells which."""
    pairs = [
        (track.leaves[one][1].data, track.leaves[other][1].data)
        for of_rank in data.tracks.values()
        if (track := of_rank.get(rank)) is not None and track.param.id in params
        if one in track.leaves and other in track.leaves
    ]
    return bool(pairs) and all(
        len(mine) == len(theirs) and abs(mine @ theirs) >= (1 - ALIKE) * np.linalg.norm(mine) * np.linalg.norm(theirs)
        for mine, theirs in ((np.nan_to_num(first), np.nan_to_num(second)) for first, second in pairs)
    )

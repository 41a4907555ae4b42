"""Passes that hand on what earlier ones left at a cut: their tokens are those passes' (probes/losses/handed_on.py)."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from gradcheck_dist.events import Event, HandedOn, Loss, LossGradient
from gradcheck_dist.ledger.contributions import UNKNOWN, Contribution, losses_of_rank
from gradcheck_dist.ledger.tracks import Slot, StepData

CHANGED = 1e-2
"""From how far from 1 on a multiple is told."""


def is_handed_on(contribution: Contribution) -> bool:
    """Whether a contribution's tokens are those of passes before it, which this one hands on."""
    return contribution.loss is not None and contribution.loss.loss_id < 0


def hands_on(data: StepData) -> bool:
    """Whether a pass of the step hands on what earlier ones left."""
    return any(isinstance(event, HandedOn) and event.passes for of_rank in data.events.values() for event in of_rank)


def changed_on_the_way(data: StepData) -> list[str]:
    """What such passes begin with, where it is not what was left at the cut, in words."""
    found = {
        f"the pass that begins at {_line(event)} hands on x {event.multiple:.6g} of the gradient that earlier passes "
        "left at a cut in the graph: what lies in front of the cut learns from another multiple of the loss than what "
        "lies behind it, unless that is made up for"
        for of_rank in data.events.values()
        for event in of_rank
        if isinstance(event, HandedOn) and event.passes and is_changed(event)
    }
    return sorted(found)


def is_changed(event: HandedOn) -> bool:
    """Whether a pass hands on another gradient than what was left."""
    return abs(event.multiple - 1) > CHANGED


def _line(event: Event) -> str:
    return event.site.short if event.site is not None else "an unknown line"


def with_handed_on(data: StepData) -> StepData:
    """The same step, in which such passes have a loss: the tokens of the passes before it, with the weights that these
    gave them, times what the gradient was multiplied by on its way.

    Passes that train parameters which the earlier ones train as well (tied embeddings) stay as they are: their tokens
    would be counted twice.
    """
    events: dict[int, list[Event]] = {}
    for rank, of_rank in data.events.items():
        made: dict[Slot, list[Event]] = {}
        losses = losses_of_rank(of_rank)
        for event in of_rank:
            if isinstance(event, HandedOn) and event.passes and not _share_parameters(data, rank, event):
                slot = (event.accumulation_step, event.microbatch)
                pairs = [pair for before in event.passes for pair in losses.get(before, ())]
                if made_of := _loss(event, pairs):
                    made[slot] = made_of
        unknown = {e.loss_id for e in of_rank if isinstance(e, Loss) and e.reduction == UNKNOWN}
        kept = [
            event
            for event in of_rank
            if not (
                isinstance(event, LossGradient)
                and event.loss_id in unknown
                and (event.accumulation_step, event.microbatch) in made
            )
        ]
        added = [event for of_slot in made.values() for event in of_slot]
        events[rank] = sorted([*kept, *added], key=lambda event: event.seq) if added else of_rank
    return replace(data, events=events)


def _share_parameters(data: StepData, rank: int, event: HandedOn) -> bool:
    own = (event.accumulation_step, event.microbatch)
    tracks = [of_rank[rank] for of_rank in data.tracks.values() if rank in of_rank]
    return any(own in track.leaves and any(slot in track.leaves for slot in event.passes) for track in tracks)


def _loss(event: HandedOn, pairs: list[tuple[LossGradient, Loss | None]]) -> list[Event]:
    """The events of such a pass's loss; [] where those of the passes before it are not known."""
    counted = [
        (gradient, gradient.num_tokens, loss)
        for gradient, loss in pairs
        if gradient.num_tokens is not None and loss is not None and loss.reduction != UNKNOWN
    ]
    num_tokens = sum(count for _, count, _ in counted)
    if len(counted) < len(pairs) or not num_tokens:
        return []
    hashes = [loss.label_hash for _, _, loss in counted]
    weights = [
        value * event.multiple
        for gradient, _, _ in counted
        for value in (gradient.weight, gradient.weight_min, gradient.weight_max)
        if value is not None
    ]
    known = [str(one).encode() for one in hashes if one is not None]
    here: dict[str, Any] = {name: getattr(event, name) for name in ("seq", "t_ns", "step")}
    here["loss_id"] = -event.seq
    # What is wrong with the weights is wrong where these losses are computed, unless it is changed on its way.
    lies_at = (event, event) if is_changed(event) else (counted[0][2], counted[0][0])
    return [
        Loss(
            **here,
            site=lies_at[0].site,
            op=counted[0][2].op,
            reduction="none",
            num_tokens=num_tokens,
            label_hash=zlib.crc32(b" ".join(known)) if len(known) == len(hashes) else None,
        ),
        LossGradient(
            **here,
            site=lies_at[1].site,
            accumulation_step=event.accumulation_step,
            microbatch=event.microbatch,
            weight=event.multiple * sum(gradient.weight * count for gradient, count, _ in counted) / num_tokens,
            weight_min=min(weights),
            weight_max=max(weights),
            num_tokens=num_tokens,
        ),
    ]

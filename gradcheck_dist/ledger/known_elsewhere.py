"""Losses over a part of the vocabulary in which no label lies, whose weight another rank knows.

Of a function that gives one number for all labels, the label's own entry of the logits' gradient tells the weight
(probes/losses/by_gradient.py). A rank without such entries has w * exp(z - n) alone, w the weight and n the logsumexp
over all classes. So has every rank that holds a part of them: where exp(z) has one multiple, both are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec

from gradcheck_dist.events import FUNCTION, Event, Loss, LossGradient
from gradcheck_dist.ledger.contributions import UNKNOWN
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.wording import numbered

SAME = 1e-2
"""Difference of two logarithms of a multiple: what bfloat16 leaves of a mean over labels."""


class _Known(NamedTuple):
    loss: Loss
    gradient: LossGradient

    @property
    def function(self) -> str:
        return self.loss.op.removeprefix(FUNCTION)

    @property
    def place(self) -> tuple[object, ...]:
        slot = self.gradient.accumulation_step, self.gradient.microbatch
        return self.function, slot, self.loss.num_labels, self.loss.label_hash


def with_weights_of_others(data: StepData) -> StepData:
    """The same step, in which such ranks have the weight and the tokens that another rank's part of the loss tells."""
    pairs = {rank: list(_by_gradient(of_rank)) for rank, of_rank in data.events.items()}
    if all(pair.loss.reduction != UNKNOWN for of_rank in pairs.values() for pair in of_rank):
        return data
    known = [pair for of_rank in pairs.values() for pair in of_rank if pair.loss.reduction != UNKNOWN]
    events: dict[int, list[Event]] = {}
    for rank, of_rank in data.events.items():
        told: dict[int, Event] = {}
        for pair in pairs[rank]:
            if pair.loss.reduction == UNKNOWN and (other := _same(pair, known)) is not None:
                told |= {id(pair.loss): _as_known(pair.loss, other.loss), id(pair.gradient): _weighed(pair, other)}
        events[rank] = [told.get(id(event), event) for event in of_rank]
    return replace(data, events=events)


def unlike_parts(data: StepData) -> list[str]:
    """Why a step is left open: parts of one loss that cannot have one weight."""
    pairs = {rank: list(_by_gradient(of_rank)) for rank, of_rank in data.events.items()}
    known = {pair.place for of_rank in pairs.values() for pair in of_rank if pair.loss.reduction != UNKNOWN}
    unlike: dict[str, set[int]] = defaultdict(set)
    for rank, of_rank in pairs.items():
        for pair in of_rank:
            if pair.loss.reduction == UNKNOWN and pair.place in known:
                site = pair.loss.site
                unlike[f"{pair.function} ({site.short if site is not None else 'line unknown'})"].add(rank)
    return [
        f"{function}: {numbered('rank', ranks)} gave {'its' if len(ranks) == 1 else 'their'} part of the classes, in "
        "which no label lies, another multiple of exp(logit) than the ranks of the labels did: what weight the loss "
        "has there is not known"
        for function, ranks in unlike.items()
    ]


def _by_gradient(events: list[Event]) -> Iterator[_Known]:
    losses = {event.loss_id: event for event in events if isinstance(event, Loss)}
    for event in events:
        if isinstance(event, LossGradient) and event.class_scale is not None and event.loss_id in losses:
            yield _Known(losses[event.loss_id], event)


def _same(pair: _Known, known: list[_Known]) -> _Known | None:
    """Of which loss this is another part; None where several could be, of unlike weights."""
    scale = pair.gradient.class_scale or 0.0
    found = [one for one in known if one.place == pair.place and abs((one.gradient.class_scale or 0.0) - scale) <= SAME]
    weights = [one.gradient.weight for one in found]
    return found[0] if found and max(weights) - min(weights) <= SAME * abs(weights[0]) else None


def _as_known(loss: Loss, other: Loss) -> Loss:
    return msgspec.structs.replace(loss, op=other.op, reduction=other.reduction, num_tokens=other.num_tokens)


def _weighed(pair: _Known, other: _Known) -> LossGradient:
    of = other.gradient
    return msgspec.structs.replace(
        pair.gradient, weight=of.weight, weight_min=of.weight_min, weight_max=of.weight_max, num_tokens=of.num_tokens
    )

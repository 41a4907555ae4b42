"""Gradients of parameters of one shape changed places: each is stepped with another one's.

## What it does
Finds gradients that from one sample to the next are another parameter's, but for a factor (a clip's), where that one
has a third one's, or the first one's, in turn. Only parameters of one shape can be compared, so it is told of those; a
gradient that is copied to another model's parameters is not meant.

## Why it matters
Both parameters are pushed in a direction that no loss asks for. Nothing fails, for shapes fit, and the norm is right.

## Example
    grads = torch.autograd.grad(loss, [named[name] for name in sorted(named)])     # "layers.10" before "layers.2"
    for param, grad in zip(model.parameters(), grads):
        param.grad = grad

## Fix
Keep one order: take parameters and gradients from one list, or name both.

    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss, params)):
        param.grad = grad

## References
- Orders of one's own, measured with torch 2.13: torch.autograd.grad returns gradients in the order of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.causes.places import kind_of
from gradcheck_dist.events import WRITTEN, Event, GradWrite
from gradcheck_dist.ledger.changed_places import ChangedPlaces, changed_places
from gradcheck_dist.wording import plural

CODE = "GS404"
NAME = "changed-places"
MAX_TOLD = 3


def audit(facts: StepFacts) -> Iterator[Remark]:
    lost = any(held.reason and held.observed is None for held in facts.held)
    found = list(changed_places(facts.data)) if lost else []
    if not found:
        return
    first = found[0]
    told = "; ".join(f"{key[1]} has that of {owner[1]}" for key, owner in islice(sorted(first.has.items()), MAX_TOLD))
    more = f", and {len(first.has) - MAX_TOLD} more" if len(first.has) > MAX_TOLD else ""
    here = f"the {kind_of(first.event)} event ({_line_of(first.event)})"
    since = f"In or behind {here}"
    if first.before is not None and first.before is not first.event:
        since = f"Between the {kind_of(first.before)} event ({_line_of(first.before)}) and {here}"
    params = frozenset(key for one in found for key in one.has)
    yield Remark(
        answer=Answer(
            explanation=f"{since} gradients changed places: {told}{more}.",
            fix="Pair gradients with parameters in one order: both from one list, or by name.",
        ),
        pattern=f"{plural(len(params), 'parameter')} with one another's gradients",
        params=params,
        ranks=tuple(sorted({one.rank for one in found})),
        rank=first.rank,
        event=_line(facts, first) or first.event,
    )


def _line_of(event: Event) -> str:
    return event.site.short if event.site is not None else "line unknown"


def _line(facts: StepFacts, found: ChangedPlaces) -> Event | None:
    """The line that wrote to one of these gradients, where that was recorded."""
    ids = {facts.data.tracks[key][found.rank].param.id for key in found.has}
    since = found.before.seq if found.before is not None else -1
    for event in facts.data.events[found.rank]:
        if not isinstance(event, GradWrite) or event.op != WRITTEN or not since < event.seq < found.event.seq:
            continue
        if not ids.isdisjoint(facts.data.params_of(found.rank, event.params)):
            return event
    return None

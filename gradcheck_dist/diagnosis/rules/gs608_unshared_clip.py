"""Some ranks clip the gradient of a parameter, and others that hold and step it as well do not.

## What it does
Compares the recorded clips of all ranks on which an optimizer reads one parameter's gradient: where a clip made it
smaller on some, and no clip was called for it on others, the parameter's copies, or its shards, are scaled apart.

## Why it matters
Copies get other updates from there on, although every gradient was reduced: ranks train models that drift apart. Of
shards, one part of a tensor moves by the clipped gradient and the other by the whole one.

## Example
    if dist.get_rank() == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

## Fix
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)      # on every rank, after the last reduction

## References
- torch.nn.utils.clip_grad_norm_: clips what lies on this rank, and tells no other rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Factor
from gradcheck_dist.diagnosis.norms.clips import ACTS
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Clip, OptimizerStep
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import numbered

CODE = "GS608"
NAME = "unshared-clip"


def could_audit(facts: StepFacts) -> bool:
    return facts.data.complete and any(len(of_rank) > 1 for of_rank in _clips(facts).values())


def audit(facts: StepFacts) -> Iterator[Remark]:
    found: dict[ParamKey, dict[int, list[Clip]]] = {}
    for key, of_rank in _clips(facts).items() if facts.data.complete else ():
        acts = any(prod(clip.coefficient for clip in clips) < 1 - ACTS for clips in of_rank.values())
        if acts and not all(of_rank.values()):
            found[key] = of_rank
    if not found:
        return
    calls = [(rank, clips) for of_rank in found.values() for rank, clips in of_rank.items()]
    clipped = numbered("rank", {rank for rank, clips in calls if clips})
    without = numbered("rank", {rank for rank, clips in calls if not clips})
    first, clip = min(
        ((rank, clips[0]) for rank, clips in calls if clips), key=lambda pair: (pair[1].coefficient, pair[0])
    )
    names = in_short(sorted({name for _, name in found}))
    yield Remark(
        answer=Answer(
            explanation=f"Rank {first} clips the gradient of {names} (x {clip.coefficient:.4g}); on {without} it "
            "is held and stepped as well, and no clip is called for it. What ranks hold of it gets unequal updates.",
            fix="Call the clip on every rank, after the last reduction.",
        ),
        pattern=f"clipped on {clipped}, not on {without}",
        params=frozenset(found),
        ranks=tuple(sorted({rank for rank, _ in calls})),
        rank=first,
        event=clip,
        factor=Factor(observed=clip.coefficient),
    )


def _clips(facts: StepFacts) -> dict[ParamKey, dict[int, list[Clip]]]:
    """The clips before the optimizer of each parameter that was judged, on each rank whose optimizer reads it."""
    result: dict[ParamKey, dict[int, list[Clip]]] = defaultdict(dict)
    events = {
        rank: [event for event in of_rank if isinstance(event, Clip | OptimizerStep)]
        for rank, of_rank in facts.data.events.items()
    }
    for held, rank in ((one, rank) for one in facts.held if one.cells for rank in one.ranks):
        track = facts.data.tracks[held.param].get(rank)
        if track is None:
            continue
        mine = [event for event in events[rank] if track.param.id in facts.data.params_of(rank, event.params)]
        if any(isinstance(event, OptimizerStep) for event in mine):
            result[held.param][rank] = [event for event in mine if isinstance(event, Clip)]
    return result

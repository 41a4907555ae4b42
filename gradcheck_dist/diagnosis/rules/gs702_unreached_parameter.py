"""Parameters took part in forward and never receive a gradient.

## What it does
Notes parameters that an optimizer holds, that require gradients and whose module was called with gradients enabled (or
in torch's reentrant checkpoint, which calls it without and means to run it again), while no backward pass of the step
reached them on any rank, whether they have no gradient or zeros that the program filled in. Frozen parameters and
modules that were not called are not meant. A remark and no accusation: an output that is on purpose not used by the
loss looks the same. An error where it is a whole pipeline stage that ran backward: what nothing depends on is no
stage.

## Why it matters
A `.detach()`, an `.item()`, a numpy round trip or a `torch.no_grad()` in the wrong place cuts a part of the model off.
It keeps its initial values, the rest learns around it, and the loss falls all the same.

## Example
    features = encoder(x).detach()        # was meant for the logging branch only
    loss = head(features).pow(2).mean()

## Fix
Take the cut out; or, where the parameter is meant to stay, say so:

    for p in encoder.parameters():
        p.requires_grad_(False)
DDP: `find_unused_parameters=True` hides this, without it DDP raises. Transformers: an unused pooler is harmless,
`add_pooling_layer=False` takes it out. A reentrant checkpoint of which no input requires a gradient (behind frozen
embeddings, as with LoRA) is never run again: `use_reentrant=False`, or `model.enable_input_require_grads()`. FSDP2
below a schedule that computes the gradients of weights apart (zero bubble, ZBV, DualPipeV): `fully_shard(...,
reshard_after_forward=False)`.

## References
- A whole stage: FSDP2 that reshards below a zero-bubble schedule, measured with torch 2.13 (scenario
  zero-bubble-reshards).
- pytorch's checkpoint.py, "None of the inputs have requires_grad=True"; microsoft/LoRA#120, transformers#21381.
- torch.Tensor.detach; DistributedDataParallel, "Expected to have finished reduction in the prior iteration".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import OptimizerStep, PipelineStep
from gradcheck_dist.ledger.tracks import ParamKey, Track
from gradcheck_dist.wording import numbered, plural

CODE = "GS702"
NAME = "unreached-parameter"


def could_audit(facts: StepFacts) -> bool:
    return facts.data.complete and any(step.grads_missing is not None for _, step in facts.events_of(OptimizerStep))


def audit(facts: StepFacts) -> Iterator[Remark]:
    reached = {key for key, of_key in facts.data.tracks.items() if any(_is_reached(t) for t in of_key.values())}
    if not facts.data.complete or not reached:
        return
    keys = {(rank, track.param.id): key for key, of_key in facts.data.tracks.items() for rank, track in of_key.items()}
    found: dict[ParamKey, list[int]] = {}
    events: list[tuple[int, OptimizerStep]] = []
    for rank, step in facts.events_of(OptimizerStep):
        params = [*facts.data.params_of(rank, step.unreached), *_filled(facts, rank, step)]
        cut = [key for param in params if (key := keys.get((rank, param))) is not None and key not in reached]
        for key in cut:
            found.setdefault(key, []).append(rank)
        if cut:
            events.append((rank, step))
    if not found:
        return
    names = sorted(key[1] for key in found)
    shown = in_short(names)
    rank, event = events[0]
    stages = _whole_stages(facts, set(found))
    yield Remark(
        answer=_stages_cut(stages)
        if stages
        else Answer(
            severity="info",
            explanation=f"The module of {shown} was called, but no backward pass reached it: the optimizer found no "
            "gradient, or zeros that the program filled in. Either its output is not used by the loss, which may be "
            "meant, or something cuts it off.",
            fix="Look for a loss that never goes backward, a detach, item, numpy or no_grad after this module, or a "
            "reentrant checkpoint around it of which no input requires a gradient (use_reentrant=False); freeze the "
            "parameter where it is meant.",
        ),
        pattern=f"{plural(len(names), 'parameter')} without a gradient",
        params=frozenset(found),
        ranks=tuple(sorted({rank for ranks in found.values() for rank in ranks})),
        rank=rank,
        event=event,
    )


def _is_reached(track: Track) -> bool:
    """Whether a gradient came to a parameter: zeros that no backward pass brought are the program's own."""
    return bool(track.leaves) or any(np.nan_to_num(point.values.data).any() for point in track.points)


def _filled(facts: StepFacts, rank: int, step: OptimizerStep) -> list[int]:
    """Parameters with a gradient that was sampled as the optimizer read it; those that take turns may have any."""
    called = set(facts.data.params_of(rank, step.called))
    tracks = (of_key[rank] for of_key in facts.data.tracks.values() if called and rank in of_key)
    return [t.param.id for t in tracks if t.param.id in called and any(point.seq == step.seq for point in t.points)]


def _whole_stages(facts: StepFacts, cut: set[ParamKey]) -> list[int]:
    """Pipeline stages that ran backward, and of which no parameter that is trained got a gradient."""
    ran = {
        stage
        for of_rank in facts.data.events.values()
        for event in of_rank
        if isinstance(event, PipelineStep)
        for stage in event.stages
    }
    return [
        stage for stage in sorted(ran) if (of := {key for key in facts.data.tracks if key[0] == stage}) and of <= cut
    ]


def _stages_cut(stages: list[int]) -> Answer:
    return Answer(
        explanation=f"The schedule ran backward on {numbered('pipeline stage', stages)}, and not one parameter there "
        "got a gradient on any rank: the optimizer leaves it all as it was. What earlier stages were sent cannot be "
        "trusted either.",
        fix="Look for what the stage's backward lost: with FSDP2 below a schedule that computes the gradients of "
        "weights apart, set reshard_after_forward=False; else a detach or no_grad in the stage.",
    )

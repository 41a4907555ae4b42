"""A GradScaler found an overflow on some ranks of a model and skipped the step there, while others took it.

## What it does
Compares ranks that train one model together (they reduce gradients with one another, are stages of one pipeline, or
evaluate the same tokens): where one unscaled infinite gradients and skipped its optimizer and another unscaled finite
ones and stepped, both cannot be right.

## Why it matters
The overflow lies in what one rank holds: its shard, its stage, its experts. It skips the update and halves its loss
scale, the others do neither. From then on parts of the model are a step apart, and gradients are divided by another
scale than the loss was multiplied by.

## Example
    scaler.unscale_(optimizer)        # found_inf is that of this rank's gradients
    scaler.step(optimizer)            # pipeline, tensor or expert parallel, or sharded by hand

## Fix
    scaler.unscale_(optimizer)
    for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)     # over all ranks of the model
    scaler.step(optimizer)
FSDP1 has torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler.

## References
- torch.amp.GradScaler.unscale_; torch.distributed.fsdp.sharded_grad_scaler (shares found_inf over its group).
- pytorch/pytorch#115710.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.events import AmpUnscale, OptimizerStep, PipelineStep, Reduce
from gradcheck_dist.wording import numbered

CODE = "GS607"
NAME = "unshared-overflow"


def could_audit(facts: StepFacts) -> bool:
    unscaled = [any(isinstance(event, AmpUnscale) for event in events) for events in facts.data.events.values()]
    return sum(unscaled) > 1


def audit(facts: StepFacts) -> Iterator[Remark]:
    skipped: dict[int, AmpUnscale] = {}
    took: set[int] = set()
    for rank, events in sorted(facts.data.events.items()):
        unscaled = [event for event in events if isinstance(event, AmpUnscale)]
        stepped = any(isinstance(event, OptimizerStep) for event in events)
        overflowed = [event for event in unscaled if event.found_inf]
        if overflowed and not stepped:
            skipped[rank] = overflowed[0]
        elif unscaled and not overflowed and stepped:
            took.add(rank)
    together = {rank: sorted(_partners(facts, rank) & took) for rank in skipped}
    alone = [rank for rank, others in together.items() if others]
    if not alone:
        return
    others = sorted({other for rank in alone for other in together[rank]})
    yield Remark(
        answer=Answer(
            explanation=f"{numbered('Rank', alone)} found an overflow in the gradients held there and skipped the "
            f"optimizer; {numbered('rank', others)}, of the same model, found none and stepped. Parts of the "
            "model are a step apart from here on, and so are the loss scales.",
            fix="Share found_inf before scaler.step: all-reduce it (MAX) over all ranks that hold parts of the model.",
        ),
        pattern=f"skipped on {numbered('rank', alone)}, taken on {numbered('rank', others)}",
        params=frozenset(key for key, of_key in facts.data.tracks.items() if not of_key.keys().isdisjoint(alone)),
        ranks=tuple(sorted({*alone, *others})),
        rank=alone[0],
        event=skipped[alone[0]],
    )


def _partners(facts: StepFacts, rank: int) -> set[int]:
    """Ranks that this one reduces gradients with, shares a pipeline with, or evaluates the same tokens as."""
    coordinate = facts.contributions.coordinate
    partners = {other for other, of in coordinate.items() if of == coordinate.get(rank)}
    for event in facts.data.events[rank]:
        if isinstance(event, PipelineStep | Reduce):
            partners |= {*event.group, *getattr(event, "replicate_group", ())}
    return partners - {rank}

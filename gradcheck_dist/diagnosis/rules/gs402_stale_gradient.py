"""Gradients of an earlier step, which the optimizer has read already, are still there and are read again.

## What it does
Finds gradient buffers that were not emptied between two optimizer steps: the next step's backward adds to them, and the
optimizer applies the old gradient once more (all of them, where nothing is ever emptied).

## Why it matters
Every step moves along the sum of all gradients since the start or since the last zero_grad: a momentum of 1 that nobody
asked for. Adam's normalisation keeps the loss going down for a long while.

## Example
    for batch in loader:
        loss_of(batch).backward()
        optimizer.step()                     # no optimizer.zero_grad() before the next backward

## Fix
Call optimizer.zero_grad() after each optimizer.step(), and for all optimizers and parameters that stepped.

## References
- torch.optim.Optimizer.zero_grad; PyTorch recipe "Zeroing out gradients in PyTorch".
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.audit import Remark, StepFacts
from gradcheck_dist.diagnosis.cells import Held
from gradcheck_dist.diagnosis.rules.verdict import Answer
from gradcheck_dist.events import OptimizerStep

CODE = "GS402"
NAME = "stale-gradient"


def could_audit(facts: StepFacts) -> bool:
    return facts.context.step > 0 and any(held.cells for held in facts.held)


def audit(facts: StepFacts) -> Iterator[Remark]:
    stale = [held for held in facts.held if _is_stale(held)]
    if not stale:
        return
    names = sorted({held.param[1] for held in stale})
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    rank = min(held.rank for held in stale)
    steps = [event for event in facts.data.events[rank] if isinstance(event, OptimizerStep)]
    yield Remark(
        answer=Answer(
            explanation=f"When the first backward pass of the step began, .grad of {shown} still held what the "
            "optimizer had read in an earlier step, and it is part of what it reads now.",
            fix="Empty the gradients after each optimizer step: optimizer.zero_grad() before the next backward pass.",
        ),
        pattern="the gradient of an earlier step is added",
        params=frozenset(held.param for held in stale),
        ranks=tuple(sorted({held.rank for held in stale})),
        rank=rank,
        event=steps[-1] if steps else None,
    )


def _is_stale(held: Held) -> bool:
    final = held.replay.final(held.rank)
    return final is not None and final.leftover

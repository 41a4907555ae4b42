"""Gradients are emptied in the middle of an accumulation.

## What it does
Finds a zero_grad() (or .grad = None) between the microbatches of one optimizer step: what was accumulated before weighs
nothing.

## Why it matters
The step is computed from the last microbatch only. The effective batch is 1/K of the one that was paid for, and the
learning rate no longer fits it.

## Example
    for microbatch in microbatches:
        optimizer.zero_grad()
        loss(model(microbatch)).backward()
    optimizer.step()

## Fix
Empty the gradients once a step, after optimizer.step() or before the first microbatch.

## References
- pytorch/torchtitan#3575; bytetriper/RAE#67.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.case import Case
from gradcheck_dist.diagnosis.context import StepContext
from gradcheck_dist.diagnosis.rules.verdict import Answer
from gradcheck_dist.events import ZeroGrad

CODE = "GS401"
NAME = "zeroed-accumulation"


def triggered(context: StepContext) -> bool:
    return context.num_accumulation > 1


def judge(case: Case) -> Answer | None:
    if not isinstance(case.event, ZeroGrad) or case.culprit.unrecorded:
        return None
    return Answer(
        explanation=f"zero_grad() runs in the middle of the step: {case.pattern.text}.",
        fix="Call zero_grad() once a step, after optimizer.step() or before the first microbatch.",
    )

"""A gradient is scaled on its way from one pipeline stage to the one before.

## What it does
Compares the gradient that left a stage's input with the one that entered the output of the stage before, of each
microbatch. Where one is a multiple of the other, all parameters of the earlier stages get that multiple of their
gradient.

## Why it matters
The earlier stages learn at another scale than the last one, and their own gradients look sound: what arrives at their
parameters is exactly what they were told to differentiate. Adam hides a constant; clipping by the global norm does not.

## Example
    grad = inputs.grad / num_stages          # in the last stage, before it is sent
    dist.send(grad, previous_rank)
    ...
    outputs.register_hook(lambda grad: grad * loss_scale)      # in the earlier stage

## Fix
Send the gradient as autograd made it, and do all scaling once, in the loss:

    dist.send(inputs.grad, previous_rank)

Look between the two lines that are named: what is sent, what is received, and hooks on the stage's output. A gradient
that is scaled to fit a smaller dtype must be scaled back before backward.

## References
- torch/distributed/pipelining/stage.py, get_bwd_send_ops and backward_one_chunk: gradients pass unchanged.
- GPipe, arXiv 1811.06965; Megatron-LM's schedules, arXiv 2104.04473.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.context import StepContext

CODE = "GS202"
NAME = "scaled-in-flight"


def triggered(context: StepContext) -> bool:
    return context.num_handed_over > 0


def judge(case: Case) -> Answer | None:
    culprit = case.culprit
    if not culprit.in_flight:
        return None
    before = culprit.before
    site = before.site if before is not None else None
    where = f" and backward at {site.short}" if site is not None else ""
    return Answer(
        explanation=f"Between the stage that sent the gradient (rank {culprit.rank}){where} of the stage before it, "
        f"the gradient was scaled: {case.pattern.text} in all parameters of the earlier stages.",
        fix="Send and differentiate the gradient as autograd made it; look at what is done to it before the send, "
        "after the receive, and in hooks on the stage's output.",
    )

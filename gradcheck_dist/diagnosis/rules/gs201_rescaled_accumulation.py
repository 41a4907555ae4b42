"""A pipeline schedule divides the accumulated gradient again at every step of an outer accumulation.

## What it does
Finds a schedule with `scale_grads=True` that is stepped several times before the optimizer: each schedule.step()
divides the whole .grad, not only what it added, by its number of microbatches M, so accumulation step k of K weighs
M^-(K-1-k) instead of 1, on every stage.

## Why it matters
All but the last accumulation step fade away: with M = 8 and K = 4 the first one keeps 1/512 of its weight. The step is
computed from little more than the last batch, the gradient norm is too small, and the loss curve still goes down.

## Example
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=mean_loss)     # scale_grads defaults to True
    for batch in accumulation:
        schedule.step(batch)                                                # divides everything by 8 each time
    optimizer.step()

## Fix
Take the division out of the schedule and put the whole normalisation into the loss:

    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=token_sum_loss, scale_grads=False)
    # token_sum_loss = F.cross_entropy(..., reduction="sum") / num_tokens_of_the_step

## References
- pytorch/torchtitan#1733, fixed by #1732; torch/distributed/pipelining/stage.py, scale_grads.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.events import ScaleGrads

CODE = "GS201"
NAME = "rescaled-accumulation"


def triggered(context: StepContext) -> bool:
    return context.axes.get("pp", 1) > 1 or context.num_stages > 1


def judge(case: Case) -> Answer | None:
    event = case.event
    if not isinstance(event, ScaleGrads) or not case.recorded or case.culprit.wrong_constant:
        return None
    divisor, steps = event.divisor, case.context.num_accumulation
    if case.pattern.kind == "geometric" and abs(case.pattern.factor - 1) <= 2 * case.pattern.tolerance:
        shape = f"accumulation step k of {steps} weighs {divisor:g}^-(K-1-k)"
        what = f"divides the whole accumulated gradient by {divisor:g} at each of {steps} schedule steps"
    else:
        shape = case.pattern.text
        what = f"divides the gradient by {divisor:g} after a loss that carries the whole normalisation already"
    return Answer(
        explanation=f"The pipeline schedule's scale_grads {what}: {shape}.",
        fix="Build the schedule with scale_grads=False and divide the token-sum loss by the tokens of the whole step.",
    )

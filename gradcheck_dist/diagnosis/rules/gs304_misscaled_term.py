"""An auxiliary loss term misses, or has once too often, a scaling that the main loss has.

## What it does
Finds terms (load balance, router z-loss, multi-token prediction) whose weight at the loss, over their declared
coefficient and number of positions, is off from the main loss's by a common factor. The main loss is right. A term that
nobody declared has no coefficient to be held against: the report tells what it weighs in one pass and in the step.

## Why it matters
The coefficient that somebody tuned is not the one that is trained with, and the real one moves with the number of
accumulation steps, microbatches or ranks. A load-balance loss that weighs too much bends the router; the main loss's
curve hardly shows it.

## Example
    loss = main_loss / accumulation_steps
    MoEAuxLossAutoScaler.apply(hidden, coefficient * aux_loss)     # the auxiliary loss is not divided

## Fix
Scale every term by the same constants as the main loss, in one place: the number of accumulation steps and
microbatches, what undoes an average over ranks, and the loss scale. A term over other positions than the main loss's
is divided by its own number of them.

## References
- NVIDIA/Megatron-LM#2237, #5047, #1532, #3159; NVIDIA-NeMo/Automodel#3359.
- volcengine/verl#6836.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case, ambiguous
from gradcheck_dist.diagnosis.causes.experiments import between_names
from gradcheck_dist.diagnosis.causes.mending import taken_out
from gradcheck_dist.diagnosis.weights.context import StepContext

CODE = "GS304"
NAME = "misscaled-term"


def triggered(context: StepContext) -> bool:
    return bool(context.terms)


def judge(case: Case) -> Answer | None:
    if not case.terms:
        return None
    factor = case.pattern.factor
    name = f" = {case.names[0].expression}" if case.names else ""
    equal = [*case.names[:1], *ambiguous(case.names, near=False)]
    subject = f"terms {', '.join(case.terms)} enter" if len(case.terms) > 1 else f"term {case.terms[0]} enters"
    return Answer(
        explanation=f"The loss {subject} backward with x {factor:.6g}{name} of the weight that the declared "
        "coefficient asks for beside the main loss, in every contribution. The main loss is not concerned.",
        fix=taken_out(equal, "the term", "the term")
        or "Scale the term by the constants of the main loss, and multiply it by the declared coefficient alone.",
        suggested_experiment=between_names(case.context, equal),
    )

"""Gradients are emptied in the middle of an accumulation.

## What it does
Finds a zero_grad() between the microbatches of one optimizer step, or lines that nobody recorded (`.grad = None`, a
buffer that every pass overwrites): what was accumulated before weighs nothing. So does what a function never added: one
that adds its weight's gradient to `main_grad` by itself, and did so in some passes of the step alone.

A pass on a line of its own that every step throws away is left open where all other tokens weigh what they should
without it: it may be for statistics of gradients, or for an attack on the input. torch.autograd.grad computes such
gradients without `.grad`, and then all is judged. So are passes in front of several others that divide by their own
number or tokens: what is left of an epoch that did not fill its last window. Without labels, what the model was given
and what the loss compares with tell passes of other batches from the same batch evaluated again.

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
- Overwritten: allenai/open-instruct#1498, deepspeedai/DeepSpeed#7981.
- Never added: AMD-AGI/Primus#1046.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import ZeroGrad
from gradcheck_dist.ledger.unadded import backward_of, unadded
from gradcheck_dist.wording import plural

CODE = "GS401"
NAME = "zeroed-accumulation"


def triggered(context: StepContext) -> bool:
    return context.num_accumulation > 1


def judge(case: Case) -> Answer | None:
    if _only_the_last(case) and (case.culprit.unrecorded or _every_other_in_its_own(case)):
        return Answer(
            explanation=f"What was accumulated is emptied or overwritten by nothing recorded: {case.pattern.text}.",
            fix="Add up what the passes of a step leave, and empty it once a step: no .grad = None between them, no "
            "buffer that each pass writes anew (a boundary flag that is set in every pass does this).",
            culprit=replace(case.culprit, unrecorded=True),
        )
    if not isinstance(case.event, ZeroGrad) or case.culprit.unrecorded:
        return None
    return Answer(
        explanation=f"zero_grad() runs in the middle of the step: {case.pattern.text}.",
        fix="Call zero_grad() once a step, after optimizer.step() or before the first microbatch.",
    )


def audit(facts: StepFacts) -> Iterator[Remark]:
    found = list(unadded(facts.data))
    if not found:
        return
    first = found[0]
    passes = sorted({one.event.accumulation_step for one in found})
    names = sorted({one.param[1] for one in found})
    shown = in_short([str(one) for one in passes])
    yield Remark(
        answer=Answer(
            explanation=f"In accumulation step {shown} a gradient arrived at the functions of {in_short(names)}, which "
            "add their weight's gradient to `main_grad` by themselves, and nothing was added, as it was in another "
            "pass of this step. They hand autograd none, so that what these passes owe is lost.",
            fix="Add to `main_grad` in every pass. `grad_added_to_main_grad` is set from the first pass of a step on; "
            "it says that autograd is not to add `.grad` on top, and not that this pass has added something.",
        ),
        pattern=f"nothing from {len(passes)} of {plural(facts.context.num_accumulation, 'pass')} in "
        f"{plural(len(names), 'parameter')}",
        params=frozenset(one.param for one in found),
        ranks=tuple(sorted({one.rank for one in found})),
        rank=first.rank,
        event=backward_of(facts.data, first),
    )


def _every_other_in_its_own(case: Case) -> bool:
    """Whether a pass is seen to leave nothing itself, as all but the last do, of which there are several: a buffer that
    each pass empties or writes anew. A hook that drops one pass is another fault."""
    gone = {cell.key[1] for _, cell in case.cells if not cell.right}
    passes = {cell.key[1] for held in case.held for cell in held.cells}
    return case.culprit.kind == "backward" and not case.culprit.absent and 1 < len(gone) == len(passes) - 1


def _only_the_last(case: Case) -> bool:
    """Whether all passes up to some accumulation step weigh nothing, and all later ones what they should but for what
    is told apart."""
    gone = {cell.key[1] for _, cell in case.cells if not cell.right}
    if case.terms or not gone or any(not cell.gone for _, cell in case.cells if not cell.right):
        return False
    last = max(gone)
    every = [(not cell.gone, cell.key[1]) for held in case.held for cell in held.cells]
    return last + 1 < case.context.num_accumulation and all(is_there == (step > last) for is_there, step in every)

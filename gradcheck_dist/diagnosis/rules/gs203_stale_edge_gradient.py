"""A pipeline stage is handed the gradients of earlier microbatches along with its own.

## What it does
Compares the gradient that entered a stage's output with those that left the stage behind it. Where it is no multiple of
its own microbatch's, and is the sum of that one and of earlier ones, they were added up on the way.

## Why it matters
Autograd adds to the `.grad` of a leaf. The tensor that a stage receives is such a leaf: where one buffer serves all
microbatches and nobody empties its gradient, every stage before the last differentiates sums. Its parameters look
sound, for what arrives at them is what they were told to differentiate, with the activations of one microbatch only.
The last stage is right, so the loss falls.

## Example
    received = torch.zeros(shape, requires_grad=True)          # once
    for batch in microbatches:
        dist.recv(received.data, previous_rank)
        loss_of(stage(received), batch).backward()
        dist.send(received.grad, previous_rank)                # the sum over all microbatches so far

## Fix
Empty it before each microbatch, or receive into a tensor of its own:

    received.grad = None

## References
- pytorch/PiPPy#1070.
- torch/distributed/pipelining/stage.py, set_requires_grad and clear_runtime_states.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.wording import plural

CODE = "GS203"
NAME = "stale-edge-gradient"


def could_audit(facts: StepFacts) -> bool:
    return bool(facts.on_the_way.matched or facts.on_the_way.stale)


def audit(facts: StepFacts) -> Iterator[Remark]:
    found = sorted(facts.on_the_way.stale, key=lambda one: one.place)
    if not found:
        return
    first = found[0]
    ranks = sorted({one.place[0] for one in found})
    number = plural(len(found), "microbatch")
    parts = " + ".join(f"{weight:.4g} x that of {_named(slot)}" for slot, weight in first.parts)
    yield Remark(
        answer=Answer(
            explanation=f"What rank {first.place[0]} was handed for {_named(first.place[2])} is {parts}: gradients of "
            "earlier microbatches were added up on the way between the stages. All parameters of the earlier stages "
            "get gradients of sums, with the activations of one microbatch.",
            fix="Empty the received tensor's .grad before each microbatch (received.grad = None), or receive into a "
            "tensor of its own.",
        ),
        pattern=f"{number} with the gradients of earlier ones",
        params=facts.trained_on(ranks),
        ranks=tuple(ranks),
        rank=first.rank,
        event=first.left,
    )


def _named(slot: tuple[int, int]) -> str:
    return f"accumulation step {slot[0]}" + (f", microbatch {slot[1]}" if slot[1] else "")

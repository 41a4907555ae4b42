"""A pipeline stage differentiates one output with the gradient that came back for another.

## What it does
Compares what a stage sent forward with what the next one was given, and the gradients that came back. An output and
what the next stage was given for it hold the same values, and their gradients have to be the same, times one number.
Where an output's is none of these, and is another's, the two were exchanged.

## Why it matters
Every gradient that was sent is used once, so norms look right and nothing is missing. But each is multiplied with the
activations of another microbatch (or tensor): the parameters of all earlier stages get a wrong direction. The stages
behind are right, so the loss falls.

## Example
    for batch in microbatches:
        outputs.append(stage(batch))
        dist.send(outputs[-1].detach(), next_rank)
    for output in reversed(outputs):                           # the next stage begins with the first
        dist.recv(gradient, next_rank)
        output.backward(gradient)

## Fix
Differentiate outputs in the order in which the next stage sends their gradients back:

    for output in outputs:

## References
- torch/distributed/pipelining/stage.py, get_bwd_recv_ops: one receive for each microbatch and output.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.ledger.misplaced import Place, slots
from gradcheck_dist.wording import numbered, plural

CODE = "GS204"
NAME = "misplaced-edge-gradient"
MAX_TOLD = 3


def could_audit(facts: StepFacts) -> bool:
    return bool(facts.on_the_way.matched or facts.on_the_way.misplaced)


def audit(facts: StepFacts) -> Iterator[Remark]:
    found = [one for one in facts.on_the_way.misplaced if one.sent is not None]
    if not found:
        return
    first = found[0]
    ranks = sorted({one.place[0] for one in found})
    within = all(one.sent[2] == one.own[2] for one in found if one.sent is not None)
    whose = "another tensor of the same pass"
    if not within and first.sent is not None:
        whose = f"its pass {_named(first.sent)}"
    yield Remark(
        answer=Answer(
            explanation=f"On {numbered('rank', ranks)}, backward gives outputs the gradients of others: what the next "
            f"stage was given of such an output has another gradient (pass "
            f"{', '.join(slots([one.place for one in found], MAX_TOLD))}). In the first of these, the output that rank "
            f"{first.own[0]} was given in its pass {_named(first.own)} gets the gradient of {whose}. Each is "
            "multiplied with activations that it does not belong to, in all parameters of the earlier stages.",
            fix="Differentiate microbatches, or several tensors of one, in the order in which the next stage sends "
            "their gradients back, each output with its own.",
        ),
        pattern=f"{plural(len(found), 'pass')} with the gradients of {'other tensors' if within else 'other passes'}",
        params=facts.trained_on(ranks),
        ranks=tuple(ranks),
        rank=first.place[0],
        event=first.entered,
    )


def _named(place: Place) -> str:
    return next(slots([place], 1))

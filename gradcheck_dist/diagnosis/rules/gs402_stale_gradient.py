"""Gradients of an earlier step, which the optimizer has read already, are still there and are read again.

## What it does
Finds gradient buffers that were not emptied between two optimizer steps: the next step's backward adds to them, and the
optimizer applies the old gradient once more (all of them, where nothing is ever emptied). Buffers of the trainer's own
(main_grad, a shard to which reductions are added) are known by what the optimizer reads: this step's gradient, and what
it read a step before. So it is with an optimizer that evaluates its closure several times a step: each evaluation is to
replace the one before. FSDP2 keeps what it was told not to reduce (set_requires_gradient_sync, set_requires_all_reduce)
where zero_grad does not reach it, and reduces it in the next step, so that the optimizer reads it too late.

## Why it matters
Every step moves along the sum of all gradients since the start or since the last zero_grad: a momentum of 1 that nobody
asked for. Adam's normalisation keeps the loss going down for a long while.

## Example
    for batch in loader:
        loss_of(batch).backward()
        optimizer.step()                     # no optimizer.zero_grad() before the next backward

## Fix
Call optimizer.zero_grad() after each optimizer.step(), and for all optimizers and parameters that stepped; in a closure
before its backward pass. Below FSDP2 let the last backward pass of each step reduce, also where a step has fewer passes
than others.

## References
- torch.optim.Optimizer.zero_grad; PyTorch recipe "Zeroing out gradients in PyTorch".
- torch.optim.LBFGS.step: "closure: reevaluates the model and returns the loss"; its example empties gradients first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Factor, Finding
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import OptimizerStep
from gradcheck_dist.ledger.discarded import REEVALUATING, reevaluates

CODE = "GS402"
NAME = "stale-gradient"
ADDED = "the gradient of an earlier step is added"
SAME = 1e-3
"""Relative; what is added up again is off by a whole number."""


def could_audit(facts: StepFacts) -> bool:
    return (facts.context.step > 0 or _num_evaluations(facts) > 1) and any(held.cells for held in facts.held)


def audit(facts: StepFacts) -> Iterator[Remark]:
    num = _num_evaluations(facts)
    stale = [held for held in facts.held if num > 1 or _is_stale(held)]
    if not any(num > 1 or held.observed is not None or _is_seen(held) for held in stale):
        return  # what could not be measured may have been replaced as well
    names = sorted({held.param[1] for held in stale})
    shown = in_short(names)
    rank = min(held.rank for held in stale)
    mine = {facts.data.tracks[held.param][rank].param.id for held in stale if held.rank == rank}
    steps = [
        event
        for event in facts.data.events[rank]
        if isinstance(event, OptimizerStep) and not mine.isdisjoint(facts.data.params_of(rank, event.params))
    ]
    if num > 1:
        yield Remark(
            answer=Answer(
                explanation=f"{REEVALUATING} evaluated its closure {num} times in this step, and nothing empties .grad "
                f"of {shown} in between: what it reads is the sum of all evaluations so far.",
                fix="Call optimizer.zero_grad() in the closure, before its backward pass.",
            ),
            pattern=f"the gradients of {num} evaluations of the same batch are added",
            params=frozenset(held.param for held in stale),
            ranks=tuple(sorted({rank for held in stale for rank in held.ranks})),
            rank=rank,
            event=steps[-1] if steps else None,
            factor=Factor(observed=float(num), exact=str(num)),
            explains=lambda finding: _is_sum_of(finding, num),
        )
        return
    late = [held for held in stale if held.rank in held.replay.waited]
    if late:
        if not all(held.rank in held.replay.waits for held in late):  # else this step's last pass is told to be missing
            yield _late(late, steps[-1] if steps else None)
        return
    yield Remark(
        answer=Answer(
            explanation=f"When the first backward pass of the step began, .grad of {shown} still held what the "
            "optimizer had read in an earlier step, and it is part of what it reads now.",
            fix="Empty the gradients after each optimizer step, before the next backward pass: optimizer.zero_grad(), "
            "or p.grad = None where parameters are updated by hand, or through copies that the optimizer has.",
        ),
        pattern=ADDED,
        params=frozenset(held.param for held in stale),
        ranks=tuple(sorted({rank for held in stale for rank in held.ranks})),
        rank=rank,
        event=steps[-1] if steps else None,
    )


def _late(held: list[Held], step: OptimizerStep | None) -> Remark:
    """What FSDP2 had not reduced when the optimizer of an earlier step came."""
    shown = in_short(sorted({one.param[1] for one in held}))
    return Remark(
        answer=Answer(
            explanation=f"When the first backward pass of the step began, FSDP2 still held gradients of {shown} from "
            "an earlier step, which it had not reduced and which zero_grad() does not reach: they are reduced in this "
            "step, and the optimizer reads them too late.",
            fix="Let the last backward pass of every step reduce: set_requires_gradient_sync(True), and with HSDP "
            "set_requires_all_reduce(True), before it, also where a step has fewer passes than others (the end of an "
            "epoch).",
        ),
        pattern=ADDED,
        params=frozenset(one.param for one in held),
        ranks=tuple(sorted({rank for one in held for rank in one.ranks})),
        rank=min(one.rank for one in held),
        event=step,
    )


def _num_evaluations(facts: StepFacts) -> int:
    """How often the optimizer evaluated its closure on the same labels, with all of these gradients kept; 1 where it is
    no such optimizer, or labels do not tell."""
    labels = Counter((one.key[0], one.label_hash) for one in facts.contributions.by_key.values())
    counts = set(labels.values())
    told = counts and all(label is not None for _, label in labels)
    return min(counts) if told and reevaluates(facts.data) else 1


def _is_sum_of(finding: Finding, num: int) -> bool:
    """Whether a finding is that the losses of so many evaluations are added."""
    factor = finding.factor.observed
    return finding.code == "GS303" and factor is not None and abs(factor / num - 1) <= SAME


def _is_seen(held: Held) -> bool:
    final = held.replay.final(held.rank)
    return final is not None and final.left_seen


def _is_stale(held: Held) -> bool:
    final = held.replay.final(held.rank)
    return final is not None and final.leftover

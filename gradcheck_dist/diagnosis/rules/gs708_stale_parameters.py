"""Forward passes compute with values that parameters had before the optimizer stepped.

## What it does
Notes modules of FSDP that are not gathered anew behind an optimizer's step, and holds what they compute with against
the shards that the optimizer changed: FSDP gathers what is sharded, and nothing else. They were gathered between
backward and the step (by a forward pass without a backward pass, by `unshard()`), or not resharded behind backward
(`set_reshard_after_backward(False)`). Notes as well what autograd made of parameters in an earlier step and a loss goes
backward through again: the casts that torch.autocast keeps while its outermost context is open (around the training
loop, say), and what a line computes of parameters before the loop. And parameters that are what they were at the start
after two steps of an optimizer that has copies of them (float32 ones, a shard), or of another rank's that has them.

## Why it matters
The gradient is that of other parameters than those that are stepped: of those of a step before, or of the initial ones
for good. All weights are right and nothing fails. The loss goes down slower, or stays where it is.

## Example
    with torch.autocast("cuda", torch.bfloat16):    # around the loop: weights are cast once
        for batch in loader:
            loss_of(batch).backward()
            optimizer.step()

## Fix
Open the context for each forward pass, and leave it before the optimizer's step:

    for batch in loader:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(batch)

With FSDP2 call `model.reshard()` in front of the optimizer's step, or run what gathers behind it. Where an optimizer
has copies, copy its values back behind each step, and where each rank steps some parameters, broadcast them.

## References
- torch/amp/autocast_mode.py, `autocast.__exit__` (the cache is cleared with the outermost context);
  X-GenGroup/Flow-Factory#186 (a context around all steps: flat loss).
- pytorch/pytorch#137348 ("the next iteration's unshard will be a no-op"); pytorch/pytorch#124319
  (set_reshard_after_backward); torch/distributed/fsdp/_flat_param.py, `needs_unshard`.
- lodestone-rock/RamTorch#13 (parameters that each rank keeps for itself after ZeRO 1's step).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import OptimizerStep, Reduce, StaleParameters
from gradcheck_dist.ledger.tracks import ParamKey, Track

CODE = "GS708"
NAME = "stale-parameters"
CAST = "ToCopyBackward0"


def could_audit(facts: StepFacts) -> bool:
    return facts.context.step > 0 and bool(facts.held)


def audit(facts: StepFacts) -> Iterator[Remark]:
    found = [
        (rank, event, params)
        for rank, event in facts.events_of(StaleParameters)
        if event.num_changed != 0 and (params := facts.params_in(rank, event.params) & _stepped(facts, rank, event))
    ]
    for kind in dict.fromkeys(_kind(event) for _, event, _ in found):
        yield _remark([one for one in found if _kind(one[1]) == kind])


def _kind(event: StaleParameters) -> tuple[bool, bool, bool]:
    return event.of_copies, event.unmoved, event.node is not None


def _stepped(facts: StepFacts, rank: int, event: StaleParameters) -> set[ParamKey]:
    """What optimizers of this step changed: others' gradients come to nothing. What none of this rank's has is trained
    here all the same, and another rank that reduces its gradient with this one was seen to step it: a step may be too
    small for half precision, or of a learning rate of zero."""
    if not event.unmoved:
        return _read_on(facts, rank)
    trained = facts.trained_on([rank])
    partners = {peer for other in facts.data.events[rank] if isinstance(other, Reduce) for peer in other.group}
    read = {param: peer for peer in partners - {rank} for param in _read_on(facts, peer)}
    return {param for param, peer in read.items() if param in trained and _moved(facts.data.tracks[param][peer])}


def _moved(track: Track) -> bool:
    """Whether a rank's own step changed a parameter in the first recorded step."""
    both = track.begun is not None and track.left is not None
    return both and not np.array_equal(track.begun, track.left, equal_nan=True)  # type: ignore[arg-type]


def _read_on(facts: StepFacts, rank: int) -> set[ParamKey]:
    steps = [event for event in facts.data.events.get(rank, ()) if isinstance(event, OptimizerStep)]
    return {param for step in steps for param in facts.params_in(rank, step.params)}


def _remark(found: list[tuple[int, StaleParameters, frozenset[ParamKey]]]) -> Remark:
    params = frozenset(param for _, _, some in found for param in some)
    rank, first, _ = found[0]
    shown = in_short(sorted({name for _, name in params}))
    return Remark(
        answer=_answer(first, shown),
        pattern="forward passes compute with values of before the optimizer's step",
        params=params,
        ranks=tuple(sorted({rank for rank, _, _ in found})),
        rank=rank,
        event=first,
    )


def _answer(event: StaleParameters, shown: str) -> Answer:
    if event.of_copies:
        return Answer(
            explanation=f"The optimizer has stepped copies of {shown}, and the model still computes with the values "
            "that it had when training began: nothing has brought the new ones back.",
            fix="Copy what the optimizer stepped into the model's parameters behind each optimizer.step(), under "
            "torch.no_grad(), or all-gather it where ranks hold parts.",
        )
    if event.unmoved:
        return Answer(
            explanation=f"Other ranks' optimizers step {shown}, this rank's does not, and its values still are those "
            "that training began with: nothing has brought the new ones. From the second step on, ranks compute with "
            "models of their own.",
            fix="Broadcast each parameter from the rank that steps it, or all-gather the parts, behind each "
            "optimizer.step().",
        )
    if event.node is None:
        return Answer(
            explanation=f"FSDP had gathered {shown} before the optimizer stepped, and did not gather again: the "
            "forward pass computes with the old values, and the gradient is theirs. A forward pass without a backward "
            "pass, or unshard(), in front of the step leaves a module unsharded, and so does "
            "set_reshard_after_backward(False) in the last backward pass.",
            fix="Run what gathers parameters (an evaluation, a prefetch) behind optimizer.step(), or call reshard() on "
            "the FSDP2 modules in front of it; let the last backward pass of a step reshard.",
        )
    if event.in_autocast and event.node == CAST:
        return Answer(
            explanation=f"The forward pass computes with casts of {shown} that torch.autocast made in an earlier step: "
            "it keeps them as long as its outermost context is open, and the optimizer has stepped inside of it.",
            fix="Open torch.autocast for each forward pass, and leave it before optimizer.step(); or give it "
            "cache_enabled=False.",
        )
    return Answer(
        explanation=f"The loss goes backward through {event.node}, which was computed of {shown} in an earlier step, "
        "before the optimizer changed them: the forward pass computes with their old values.",
        fix="Compute what is made of these parameters in each step anew, in its forward pass.",
    )

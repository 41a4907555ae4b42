"""Data-parallel ranks began with different models.

## What it does
Compares a few values of every parameter over the ranks that reduce its gradient together, at the begin and at the end
of the first recorded step. Where no parameter is equal on ranks that train on different data, each of them began with a
model of its own.

## Why it matters
The reduced gradient is the gradient of no model: each rank steps its own weights by the mean of gradients that were
taken at others'. All ranks report plausible losses, and the checkpoint keeps one of them.

## Example
    torch.manual_seed(seed + rank)               # for the data, but the model is drawn from it too
    model = Net()
    ...
    for p in model.parameters():
        dist.all_reduce(p.grad)

## Fix
    for tensor in model.state_dict().values():   # once, before the first step
        dist.broadcast(tensor, src=0)
DistributedDataParallel does it unless `init_sync=False`; under HSDP, load one checkpoint or seed all replicas alike.
Where ranks hold different parts of a model on purpose, reduce over the ranks that hold the same part.

## References
- torch/nn/parallel/distributed.py, _sync_module_states; torch.distributed.fsdp, sync_module_states.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.audits.unlike import first_of
from gradcheck_dist.wording import numbered

CODE = "GS106"
NAME = "unequal-start"


def could_audit(facts: StepFacts) -> bool:
    return facts.mixed.tells


def audit(facts: StepFacts) -> Iterator[Remark]:
    found = facts.mixed
    if not found.began_apart:
        return
    rank, event = first_of(found.unlike)
    num = len(found.unlike)
    yield Remark(
        answer=Answer(
            explanation=f"{numbered('Rank', found.ranks)} reduce their gradients together and hold different "
            f"models: all {num} parameters whose values tell differ between them when the first recorded step begins, "
            "and when it is over. A gradient that is the mean over different models is the gradient of none.",
            fix="Broadcast parameters and buffers from one rank before the first step, or draw them from one seed on "
            "all ranks and seed the data apart. If these ranks hold different parts of a model on purpose, reduce over "
            "the ranks that hold the same part only.",
        ),
        pattern=f"all {num} parameters whose values tell differ between ranks that reduce them together",
        params=frozenset(one.param for one in found.unlike),
        ranks=found.ranks,
        rank=rank,
        event=event,
    )

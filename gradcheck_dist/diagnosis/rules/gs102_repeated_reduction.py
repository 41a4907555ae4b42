"""The accumulated gradient is summed over ranks again at every backward.

## What it does
Finds a data-parallel reduction that runs at each backward of an accumulation and sums: what was already reduced is
multiplied by the number of ranks W once more each time, so accumulation step k of K weighs W^(K-1-k) instead of 1.

## Why it matters
Early microbatches dominate the step, geometrically: with 8 ranks and 4 accumulation steps the first weighs 512 times
the last. An averaging reduction hides the same omission (averaging equal values changes nothing), so the fault
appears the day someone replaces the average by a sum.

## Example
    ddp.register_comm_hook(None, sum_hook)
    for microbatch in microbatches:                # no ddp.no_sync() on all but the last
        (loss(ddp(microbatch)) / num_tokens).backward()

## Fix
Reduce once, at the last accumulation step:

    for i, microbatch in enumerate(microbatches):
        with contextlib.nullcontext() if i == len(microbatches) - 1 else ddp.no_sync():
            (loss(ddp(microbatch)) / num_tokens).backward()

The forward must be inside no_sync too: DDP decides there. FSDP2: set_requires_gradient_sync(is_last).

## References
- pytorch/torchtitan#2323 (discussion); torch.nn.parallel.DistributedDataParallel.no_sync.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.words import reduction
from gradcheck_dist.events import DATA_PARALLEL, Reduce

CODE = "GS102"
NAME = "repeated-reduction"


def triggered(context: StepContext) -> bool:
    return any(context.axes.get(axis, 1) > 1 for axis in ("dp_replicate", "dp_shard", "cp"))


def judge(case: Case) -> Answer | None:
    event = case.reduce
    if event is None or not case.recorded or case.culprit.wrong_constant:
        return None
    factor = case.culprit.factor
    size = len(event.group)
    if factor is None or abs(factor / size - 1) > max(1e-3, 2 * case.pattern.tolerance):
        return None
    if case.pattern.kind == "geometric":
        shape = f"accumulation step k of {case.context.num_accumulation} weighs {size}^(K-1-k)"
    else:
        shape = case.pattern.text
    if case.context.ranks_per_batch(event.group) == size:
        return Answer(
            explanation=f"The {reduction(event)} sums over {size} ranks that evaluate one batch, and each "
            f"of them already has the whole gradient: {shape}.",
            fix="Leave these parameters out of this sum. Over ranks that share a batch (tensor parallel, stages) only "
            "those are summed of whose gradients each rank has a summand, as of norms under sequence parallelism or a "
            "matrix that is tied over stages, and once.",
        )
    return Answer(
        explanation=f"The {reduction(event)} sums over {size} ranks what an earlier one has already summed: {shape}.",
        fix=f"Reduce only at the last accumulation step{_how(event)}."
        if case.pattern.kind == "geometric"
        else "Reduce each gradient once over these ranks: drop this reduction, or the earlier one.",
    )


def _how(event: Reduce) -> str:
    """How a reduction is kept from running in the other passes."""
    if event.impl not in DATA_PARALLEL:
        return ": after the loop over the passes, or, in a hook, in the last pass only"
    return ": run forward and backward of the others under no_sync()"

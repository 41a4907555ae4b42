"""A gradient was never combined over the ranks that should share it.

## What it does
Finds contributions that never reached a rank that holds the parameter: other ranks' tokens weigh nothing there, the
own rank's keep the weight that they had before the reduction that did not come.

## Why it matters
Every rank now trains its own model on its own data. Replicas drift apart, each prints a plausible norm and loss, and
the checkpoint keeps one of them. Where parameters are averaged instead (local SGD, DiLoCo), which is seen when it
happens, nobody is accused.

## Example
    for i, microbatch in enumerate(microbatches):
        sync = i != len(microbatches) - 1                 # negated: the last backward must reduce
        with contextlib.nullcontext() if sync else ddp.no_sync():
            loss(ddp(microbatch)).backward()

## Fix
Make the last backward of the step reduce, for forward and backward alike; compute gradients through the wrapped
module (not through `module.module` or torch.autograd.grad); do not list a trained parameter as ignored.

## References
- huggingface/transformers#34645 (4.46.2); Lightning #4916; karpathy/build-nanogpt #30; pytorch #144530.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.case import Case
from gradcheck_dist.diagnosis.context import StepContext
from gradcheck_dist.diagnosis.rules.verdict import Answer
from gradcheck_dist.events import Reduce

CODE = "GS103"
NAME = "missing-reduction"


def triggered(context: StepContext) -> bool:
    return context.contributions.num_coordinates > 1


def judge(case: Case) -> Answer | None:
    if not case.culprit.absent or case.context.contributions.num_coordinates < 2:
        return None
    foreign = [cell for held, cell in case.cells if not cell.right and _is_foreign(case, held.rank, cell.key[0])]
    if not foreign or any(abs(cell.ratio) > max(1e-3, cell.margin) for cell in foreign):
        return None
    steps = sorted({cell.key[1] for cell in foreign})
    which = (
        f"of accumulation step(s) {', '.join(map(str, steps))} " if len(steps) < case.context.num_accumulation else ""
    )
    sync = getattr(case.event, "sync", None)
    why = " (the wrapper was told not to synchronise in this pass)" if sync is False else ""
    others = [cell for held in case.held for cell in held.cells if _is_foreign(case, held.rank, cell.key[0])]
    reduced = any(isinstance(entry.event, Reduce) for held in case.held for entry in held.replay.history(held.rank))
    what = "no reduction over these ranks" if reduced else "no reduction"
    apart = (
        " No gradient was reduced at all: where ranks are meant to train apart and average their parameters every few "
        "steps (local SGD, DiLoCo), that is right."
        if case.everywhere and not reduced and all(abs(cell.ratio) <= max(1e-3, cell.margin) for cell in others)
        else ""
    )
    return Answer(
        explanation=f"Other ranks' contributions {which}never reach this gradient: {what} followed the last "
        f"backward{why}. {case.pattern.text[0].upper()}{case.pattern.text[1:]}.{apart}",
        fix="Let the last backward of the step reduce: leave no_sync() before its forward, and compute gradients "
        "through the wrapped module.",
    )


def _is_foreign(case: Case, holder: int, data_rank: int) -> bool:
    return case.context.contributions.coordinate.get(holder) != data_rank

"""Data-parallel ranks held one model, and do not keep it alike.

## What it does
Compares a few values of up to eight parameters over the ranks that reduce their gradients together: as the optimizer
left them, and as the next recorded step begins with them. Where most are unlike in both, and in one direction, copies
have gone apart, though gradients may be equal on all ranks. What is moved for one step and taken back (perturbations of
sharpness-aware training, noise on weights) is not, nor is what owners send behind the step. Where ranks read unequal
gradients, or clip or skip alone, that is told in its place.

## Why it matters
Nothing brings copies together again: what is reduced are gradients, and DistributedDataParallel broadcasts parameters
once, when it is made. From there on, the reduced gradient is the mean of gradients that were taken at different models,
so it is that of none. All weights are right and nothing fails, the loss goes down slower, and the checkpoint keeps one
rank's copy.

## Example
    scheduler = ReduceLROnPlateau(optimizer)
    ...
    optimizer.step()
    scheduler.step(validation_loss)              # each rank's own: some lower their learning rate, some do not

## Fix
Let all ranks make one update: decide by a number that was all-reduced, load the optimizer's state on all ranks, draw
random numbers for parameters from one seed, and change parameters behind the step on all ranks alike, or broadcast
them:

    dist.all_reduce(validation_loss)
    scheduler.step(validation_loss)

## References
- PyTorch's notes on DistributedDataParallel ("Parameters are never broadcast between processes. The module performs an
  all-reduce step on gradients and assumes that they will be modified by the optimizer in all processes in the same
  way"): torch/nn/parallel/distributed.py.
- lucidrains/DALLE-pytorch#268, rmchurch/disruptcnn#3 (ReduceLROnPlateau by each rank's own loss);
  vllm-project/speculators#926 (a checkpoint that rank 0 alone loads).
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.drifting import Drifting, drifting
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Event, OptimizerStep
from gradcheck_dist.wording import numbered

CODE = "GS107"
NAME = "drifting-copies"
SAME = 1e-2
"""Relative; one number for all parameters."""


def could_audit(facts: StepFacts) -> bool:
    return facts.context.step > 0 and facts.mixed.tells


def audit(facts: StepFacts) -> Iterator[Remark]:
    found = list(drifting(facts))
    if not found or facts.mixed.began_apart:
        return
    first = max(found, key=lambda one: len(one.holders))
    ranks = tuple(sorted({rank for one in found for part in one.holders for rank in part}))
    groups = " | ".join(",".join(map(str, part)) for part in first.holders)
    apart = min(reversed(first.holders), key=len)[0]
    yield Remark(
        answer=Answer(
            explanation=f"{numbered('Rank', ranks)} reduce the gradients of "
            f"{in_short(sorted({one.param[1] for one in found}))} together, and hold other values of these than one "
            f"another when step {facts.context.step} begins (ranks with equal ones: {groups}). {_since(found)} What is "
            "reduced is the mean of gradients that were taken at different models, and nothing makes these one again.",
            fix="Let all ranks make one update: one learning rate, weight decay and state of the optimizer on all "
            "(decide by numbers that are all-reduced, load checkpoints on every rank), random numbers for parameters "
            "from one seed, and lines that change parameters on all ranks alike, or a broadcast behind them.",
        ),
        pattern=f"copies that are reduced together have gone apart: ranks {groups}",
        params=frozenset(one.param for one in found),
        ranks=ranks,
        rank=apart,
        event=_step_on(facts, apart),
    )


def _since(found: list[Drifting]) -> str:
    """When the copies went apart, in a sentence."""
    one = found[0]
    if any(each.alike_at_first is None for each in found):
        return "Since when is not known."
    if not all(each.alike_at_first for each in found):
        return "They were unlike when the first recorded step began."
    if all(each.moved_alike for each in found):
        return "They were equal when the first recorded step's optimizer had stepped: what set them apart came later."
    ratios = [each.ratio for each in found]
    told = [ratio for ratio in ratios if ratio is not None]
    if len(told) == len(ratios) and max(told) - min(told) <= SAME * max(told) and abs(told[0] - 1.0) > SAME:
        return (
            f"They were equal when the first recorded step began, and its update on rank {one.holders[-1][0]} is that "
            f"on rank {one.holders[0][0]} times {sum(told) / len(told):.4g}: another learning rate."
        )
    return "They were equal when the first recorded step began, and its optimizer left them unlike."


def _step_on(facts: StepFacts, rank: int) -> Event | None:
    """The rank's first optimizer step of these."""
    return next((event for event in facts.data.events.get(rank, ()) if isinstance(event, OptimizerStep)), None)

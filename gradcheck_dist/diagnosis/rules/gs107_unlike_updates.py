"""Ranks that train one model update it each in its own way.

## What it does
Compares what ranks that reduce a parameter's gradient together, or hold copies of it and work on one batch (tensor
parallelism), step it with: the learning rate, weight decay and other numbers of their optimizers, for copies and for
FSDP's shards. And it compares copies, by a few values of up to eight parameters: as the optimizer left them, and as the
next recorded step begins with them. Where most are unlike in both, and in one direction, they have gone apart, though
gradients may be equal on all ranks. What is moved for one step and taken back (perturbations of sharpness-aware
training, noise on weights) has not, nor what owners send behind the step. Where ranks read unequal gradients, or clip
or skip alone, that is told in its place.

## Why it matters
Nothing brings copies together again: what is reduced are gradients, and DistributedDataParallel broadcasts parameters
once, when it is made. From there on, the reduced gradient is the mean of gradients that were taken at different models,
so it is that of none. Under FSDP a part of each parameter learns faster than another. All weights are right and nothing
fails, the loss goes down slower, and the checkpoint keeps one rank's copy.

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

from collections import defaultdict
from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.audits.unlike_updates import GONE_APART, Drifting, OwnNumbers, drifting, own_numbers
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import SHARDING, Event, Exchange, OptimizerStep, Reduce
from gradcheck_dist.wording import numbered

CODE = "GS107"
NAME = "unlike-updates"
_NAMES = {"lr": "learning rate", "weight_decay": "weight decay"}


def could_audit(facts: StepFacts) -> bool:
    reduced = any(len(event.group) > 1 for _, event in facts.events_of(Reduce))
    return reduced or any(len(event.group) > 1 for _, event in facts.events_of(Exchange))


def audit(facts: StepFacts) -> Iterator[Remark]:
    if facts.mixed.began_apart:
        return
    told, apart = list(own_numbers(facts)), list(drifting(facts))
    if told:
        yield _of_numbers(facts, told, apart)
    elif apart:
        yield _of_copies(facts, apart)


def _of_numbers(facts: StepFacts, told: list[OwnNumbers], apart: list[Drifting]) -> Remark:
    first = told[0]
    by_rank = {rank: number for one in reversed(told) if one.name == first.name for rank, number in one.by_rank.items()}
    parts: dict[float, list[int]] = defaultdict(list)
    for rank, number in sorted(by_rank.items()):
        parts[number].append(rank)
    each = ", ".join(f"{number:g} on {numbered('rank', ranks)}" for number, ranks in parts.items())
    name = _NAMES.get(first.name, first.name)
    rank = min(reversed(parts.values()), key=len)[0]
    names = in_short(sorted({one.param[1] for one in told}))
    in_shards = first.event is not None and first.event.impl in SHARDING - {"replicate"}
    have = f"reduce the gradients of {names} together" if first.event is not None else f"hold copies of {names}"
    return Remark(
        answer=Answer(
            explanation=f"{numbered('Rank', sorted(by_rank))} {have}, and their optimizers step these with a {name} of "
            f"{each}. "
            + ("Shards of one parameter are updated unlike." if in_shards else "Copies of one model go apart by that.")
            + (f" {_apart(facts, apart)}" if apart else ""),
            fix=f"Give all ranks one {name}."
            + " A scheduler has to step on all of them, and to decide by numbers that are all-reduced or the same."
            * (first.name == "lr"),
        ),
        pattern=f"{name} {each}",
        params=frozenset(one.param for one in told),
        ranks=tuple(sorted(by_rank)),
        rank=rank,
        event=_step_on(facts, rank),
    )


def _of_copies(facts: StepFacts, apart: list[Drifting]) -> Remark:
    first = max(apart, key=lambda one: len(one.holders))
    ranks = tuple(sorted({rank for one in apart for part in one.holders for rank in part}))
    rank = min(reversed(first.holders), key=len)[0]
    return Remark(
        answer=Answer(
            explanation=f"{numbered('Rank', ranks)} reduce the gradients of "
            f"{in_short(sorted({one.param[1] for one in apart}))} together. {_apart(facts, apart)} {_since(apart)}",
            fix="Let all ranks make one update: one learning rate, weight decay and state of the optimizer on all "
            "(decide by numbers that are all-reduced, load checkpoints on every rank), random numbers for parameters "
            "from one seed, and lines that change parameters on all ranks alike, or a broadcast behind them.",
        ),
        pattern=f"{GONE_APART}: ranks {_groups(first)}",
        params=frozenset(one.param for one in apart),
        ranks=ranks,
        rank=rank,
        event=_step_on(facts, rank),
    )


def _groups(one: Drifting) -> str:
    return " | ".join(",".join(map(str, part)) for part in one.holders)


def _apart(facts: StepFacts, found: list[Drifting]) -> str:
    first = max(found, key=lambda one: len(one.holders))
    return (
        f"When step {facts.context.step} begins they hold other values than one another (ranks with equal ones: "
        f"{_groups(first)}): what is reduced is the mean of gradients that were taken at different models, and nothing "
        "makes these one again."
    )


def _since(found: list[Drifting]) -> str:
    """When the copies went apart, in a sentence."""
    if any(each.alike_at_first is None for each in found):
        return "Since when is not known."
    if not all(each.alike_at_first for each in found):
        return "They were unlike when the first recorded step began."
    if any(each.moved_alike is None for each in found):
        return "They were equal when the first recorded step began."
    if all(each.moved_alike for each in found):
        return "They were equal when the first recorded step's optimizer had stepped: what set them apart came later."
    return "They were equal when the first recorded step began, and its optimizer left them unlike."


def _step_on(facts: StepFacts, rank: int) -> Event | None:
    """The rank's first optimizer step of these."""
    return next((event for other, event in facts.events_of(OptimizerStep) if other == rank), None)

"""One loss is differentiated in several passes of a step, and `.grad` keeps all of its gradients.

## What it does
Finds backward passes that start from a loss which an earlier pass of the same step has differentiated already, for the
same parameters, and whose gradients add up: its tokens enter the step once and the gradient several times. Gradients
that were only looked at or emptied in between, and passes for parameters of their own, are none of this.

## Why it matters
In a running total that goes backward after every microbatch, the first of K microbatches weighs K times as much as the
last one; a call with retain_graph too many doubles the whole gradient. Both train, with a loss curve that looks right.

## Example
    total = 0.0
    for microbatch in microbatches:
        total = total + loss_of(microbatch) / num_tokens
        total.backward(retain_graph=True)    # the earlier microbatches' losses once more
    optimizer.step()

## Fix
Call backward() on each microbatch's own loss, or once on the total behind the loop. Where retain_graph=True stands only
because a second backward pass failed without it, that pass is the one too many.

## References
- torch.Tensor.backward: "This function accumulates gradients in the leaves"; `retain_graph`.
- PyTorch, "Zeroing out gradients": why passes add up.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Factor
from gradcheck_dist.diagnosis.losses.repeated import Repeats, repeats
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Backward, Event

CODE = "GS403"
NAME = "repeated-backward"
SHOWN = 8
"""Accumulation steps whose numbers are all written out."""


def could_audit(facts: StepFacts) -> bool:
    return len(facts.contributions.by_key) > 1 and any(held.cells for held in facts.held)


def audit(facts: StepFacts) -> Iterator[Remark]:
    found = None if facts.context.shared_out else repeats(facts.data, facts.contributions, facts.held)
    if found is None or not found.params:
        return
    counts = _by_step(found)
    same = counts[0] if len(set(counts)) == 1 else None
    rank, event = _first_again(facts, found)
    yield Remark(
        answer=Answer(
            explanation="This pass starts from a loss that an earlier pass of the same step has differentiated, and "
            f".grad of {in_short(sorted({name for _, name in found.params}))} keeps both gradients: tokens enter "
            f"up to {max(counts)} times. The table's weights are those of one pass.",
            fix="Call backward() on each microbatch's own loss, or once on their sum after the loop: the pass that "
            "needed retain_graph=True before it is one too many.",
        ),
        pattern=f"every loss goes backward {same} times"
        if same
        else f"tokens weigh x {_written(counts)} by accumulation step, as often as their losses go backward",
        params=found.params,
        ranks=tuple(sorted({rank for held in facts.held if held.param in found.params for rank in held.ranks})),
        rank=rank,
        event=event,
        factor=Factor(observed=float(same), exact=str(same)) if same else Factor(observed=None),
    )


def _by_step(found: Repeats) -> list[int]:
    """How often losses are differentiated, by the accumulation step with which they enter."""
    counts: dict[int, int] = {}
    for (_, step, _), count in sorted(found.times.items(), key=lambda item: item[0][1]):
        counts[step] = max(count, counts.get(step, 0))
    return list(counts.values())


def _written(counts: list[int]) -> str:
    shown = counts if len(counts) <= SHOWN else [*counts[: SHOWN // 2], "...", counts[-1]]
    return " ".join(map(str, shown))


def _first_again(facts: StepFacts, found: Repeats) -> tuple[int, Event | None]:
    """The first pass that differentiates a loss again, and its rank."""
    for key in sorted(found.again, key=lambda key: key[1:]):
        for rank, events in sorted(facts.data.events.items()):
            for event in events if facts.contributions.coordinate.get(rank, rank) == key[0] else ():
                if isinstance(event, Backward) and (event.accumulation_step, event.microbatch) == key[1:]:
                    return rank, event
    return min(facts.data.events), None

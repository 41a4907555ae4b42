"""What lines of the program multiply gradients and losses by, in words."""

from __future__ import annotations

from collections import defaultdict

from gradcheck_dist.diagnosis.weights.named_counts import numbers_of
from gradcheck_dist.events import SCALED, GradWrite
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.tracks import StepData


def lines_in_words(data: StepData, contributions: Contributions) -> dict[str, float]:
    """By words for them, numbers that lines multiply gradients or losses by."""
    return _scaled_by(data) | _multiplied_by(contributions)


def lines_that_scale(data: StepData) -> dict[int, int]:
    """By rank, how many lines of the trainer's multiply gradients where they lie."""
    writes = {rank: (e for e in events if isinstance(e, GradWrite) and e.op == SCALED)
              for rank, events in data.events.items()}  # fmt: skip
    return {rank: len({(one.site.file, one.site.line) for one in of_rank if one.site is not None})
            for rank, of_rank in writes.items()}  # fmt: skip


def _multiplied_by(contributions: Contributions) -> dict[str, float]:
    """What lines multiply losses by, in all passes or in some of them."""
    numbers = {number for one in contributions.by_key.values() for number in numbers_of(one)}
    return {f"what {one.site.short} ({one.written}) multiplies the loss by": one.factor for one in numbers}


def _scaled_by(data: StepData) -> dict[str, float]:
    """What each line multiplies gradients by that does so once in the step, by the same number on every rank."""
    acted: dict[str, list[int]] = defaultdict(list)
    factors: dict[str, set[float | None]] = defaultdict(set)
    for rank, events in data.events.items():
        for one in events:
            if isinstance(one, GradWrite) and one.site is not None and one.params is not None:
                acted[one.site.short].append(rank)
                factors[one.site.short].add(one.factor)
    return {
        f"what {line} multiplies gradients by": factor
        for line, (factor, *others) in factors.items()
        if not others and factor is not None and factor != 1 and sorted(acted[line]) == sorted(data.events)
    }

"""What the losses of some passes count together."""

from __future__ import annotations

from collections.abc import Iterable

from gradcheck_dist.ledger.contributions import losses_of_rank
from gradcheck_dist.ledger.tracks import Slot
from gradcheck_dist.trace.run import Run

Counted = tuple[int | None, int | None]
"""(hash of the labels, tokens or elements) of one loss"""


def losses_by_pass(run: Run, step: int, rank: int) -> dict[Slot, list[Counted]]:
    """The losses of each of a rank's passes."""
    events = [event for event in run.ranks[rank].events if event.step == step]
    return {
        slot: [
            (loss.label_hash if loss is not None else None, gradient.num_tokens or gradient.num_reduced)
            for gradient, loss in pairs
        ]
        for slot, pairs in losses_of_rank(events).items()
    }


def count(losses: Iterable[Counted]) -> int | None:
    """Their tokens (or elements) together; None where there are none, or one counts nothing."""
    return total(number for _, number in losses)


def total(counts: Iterable[int | None]) -> int | None:
    """The sum of counts; None where there are none, or one is not known."""
    numbers = list(counts)
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None

"""Recorded sums that add up what their ranks already hold alike, of losses that count nothing.

Weights that are too large by just these ranks need no coefficient to say why. Where they come out right, a plain number
before the losses may be what makes up for the sum, or their coefficient (half a squared error on two ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.named_counts import common_numbers, may_be_a_coefficient
from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.contributions import Contributions

SAME = 1e-3
ADDED_AGAIN = "adds up again what these hold alike"


def summed_again(judged: Sequence[Held]) -> bool:
    """Whether all weights are too large by just the ranks of such a sum."""
    told = [held for held in judged if held.cells]
    return bool(told) and all(
        any(all(abs(cell.ratio - ranks) <= SAME * ranks for cell in held.cells) for ranks in _adding_alike(held))
        for held in told
    )


def made_up_for(contributions: Contributions, judged: Sequence[Held]) -> str:
    """Why weights that are right may be so by chance: a plain number before the losses makes up for such a sum; ""
    where none does."""
    told = [held for held in judged if held.cells]
    again = set[int].intersection(*map(_adding_alike, told)) if told else set()
    for number in common_numbers(contributions) if again else ():
        ranks = round(1 / abs(number.factor))
        if ranks in again and abs(abs(number.factor) * ranks - 1) <= SAME and may_be_a_coefficient(number):
            return (
                f"weights are right where {number.written} before the losses ({number.site.short}) divides them by "
                f"{ranks}; where it is their coefficient (half a squared error), all are x {ranks}: a recorded sum "
                f"over {ranks} ranks {ADDED_AGAIN}"
            )
    return ""


def _adding_alike(held: Held) -> set[int]:
    """By how many a recorded sum multiplied all that all ranks had brought to a gradient."""
    return {
        later.event.num_ranks
        for earlier, later in pairwise(held.replay.history(held.rank))
        if isinstance(later.event, Reduce) and later.event.op == "sum" and later.event.num_ranks > 1
        if np.all(earlier.nominal != 0)
        if np.allclose(later.nominal, earlier.nominal * later.event.num_ranks, rtol=SAME, atol=0.0)
    }

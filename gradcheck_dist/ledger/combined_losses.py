"""Losses that ranks combine before backward: `torch.distributed.nn.all_reduce(loss)`, or a function of one's own.

What comes back through such a collective multiplies the loss's gradient as a number does that is written before it, on
the collective's line. Whether it stands before all of the loss, and not in a term beside it, its number tells: what the
recorded numbers leave of the loss's weight is just what the collective's backward multiplies by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import isfinite, prod

import msgspec
import numpy as np

from gradcheck_dist.events import Event, Exchange, Loss, LossGradient, LossNumber

SAME = 1e-5
SUM = "sum"
ONE = (1,)
ARRIVED, GIVEN = 2, 3
"""Where these stand in the values of an exchange of one number: input, output, what arrived, what backward gave."""
MOST = 3


Slot = tuple[int, int]
"""(accumulation step, microbatch)"""


def collectives_on_numbers(events: Iterable[Event]) -> dict[Slot, list[LossNumber]]:
    """By pass of a rank, what the backward of each collective on one number multiplies by."""
    found: dict[Slot, list[LossNumber]] = defaultdict(list)
    for event in events:
        if isinstance(event, Exchange) and (number := _number(event)) is not None:
            found[event.accumulation_step, event.microbatch].append(number)
    return found


def with_collectives(gradient: LossGradient, loss: Loss | None, of_pass: Sequence[LossNumber]) -> LossGradient:
    """A loss's gradient whose `numbers` tell those collectives of its pass, too, that multiply all of it."""
    for num in range(1, min(len(of_pass), MOST) + 1):
        for some in combinations(of_pass, num):
            factor = prod(number.factor for number in some)
            if any(abs(left - factor) <= SAME * abs(factor) for left in unseen(gradient, loss)):
                return msgspec.structs.replace(gradient, numbers=[*(gradient.numbers or ()), *some])
    return gradient


def unseen(gradient: LossGradient, loss: Loss | None) -> tuple[float, ...]:
    """What multiplies a loss's mean, or its sum, beside known numbers and hooks; () where nothing tells."""
    num_tokens = gradient.num_tokens or (loss.num_tokens if loss is not None else None) or 1
    seen = prod([gradient.hooks_factor or 1.0, *(number.factor for number in gradient.numbers or ())])
    if not seen:
        return ()
    if gradient.mean_weight is not None:
        return (gradient.mean_weight / seen,)
    return (gradient.weight / seen, gradient.weight * num_tokens / seen)


def _number(event: Exchange) -> LossNumber | None:
    """What the backward of a collective on one number multiplies by; None where it is 1, or no such collective."""
    if event.site is None or len(event.group) < 2 or event.input_counts != ONE or event.put_back or event.of_leaf:
        return None
    values = np.frombuffer(event.values, dtype=np.float32)
    if event.operation == SUM:
        factor = float(len(event.group))  # torch documents it; what backward gives is not read
    elif event.output_counts == ONE and len(values) > GIVEN and values[ARRIVED]:
        factor = float(values[GIVEN] / values[ARRIVED])
    else:
        return None
    if not isfinite(factor) or factor in (0, 1):
        return None
    name = next(iter(event.collectives), "all_reduce")
    return LossNumber(factor, f"through {name} over {len(event.group)} ranks", "", event.site)

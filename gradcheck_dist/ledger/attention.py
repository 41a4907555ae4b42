"""Whether what came back through attention over several ranks can be its gradient.

Two sums of inner products have to be equal, whatever the attention masks or drops (probes/activations/attention.py).
That they are proves nothing; that they are not means another backward, or a function that is no attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gradcheck_dist.events import AttentionBackward, Event
from gradcheck_dist.ledger.solve import EPSILON

UNEQUAL = 0.05
"""Relative difference from which two sums are not equal."""
DEVIATIONS = 16
"""Standard deviations of what rounding makes of a sum of products, within which they may be."""


@dataclass(frozen=True)
class Unbalanced:
    """An application that all ranks of its group recorded. `of_values`: what the gradients of values come to, relative
    to what the output's ask for; `of_keys`: the keys', relative to the queries'. None where these are equal, 0 where
    there is nothing to relate to."""

    events: Mapping[int, AttentionBackward]
    of_values: float | None
    of_keys: float | None

    @property
    def first(self) -> AttentionBackward:
        return self.events[min(self.events)]


def unbalanced(events: Mapping[int, list[Event]]) -> Iterator[Unbalanced]:
    """The applications of a step of which a sum is not what it has to be."""
    found: dict[tuple[object, ...], dict[int, AttentionBackward]] = defaultdict(dict)
    for rank, of_rank in events.items():
        for event in of_rank:
            if isinstance(event, AttentionBackward):
                place = (event.group, event.function, event.accumulation_step, event.microbatch, event.index)
                found[place][rank] = event
    for of_group in found.values():
        if set(of_group) != set(next(iter(of_group.values())).group):
            continue
        read = [np.frombuffer(event.values, np.float32).astype(np.float64) for event in of_group.values()]
        if any(len(one) != 8 or not np.isfinite(one).all() for one in read):
            continue
        if any(len(event.counts) != 4 for event in of_group.values()):
            continue
        counts = np.array([event.counts for event in of_group.values()], np.float64)
        noise = max(EPSILON.get(event.dtype, EPSILON["bfloat16"]) for event in of_group.values())
        products = np.sum([one[:4] for one in read], 0)
        spread = np.sum([one[4:] ** 2 for one in read] / np.maximum(counts, 1), 0)
        of_values, of_keys = (_ratio(products[i : i + 2], noise * np.sqrt(spread[i : i + 2].sum())) for i in (0, 2))
        if of_values is not None or of_keys is not None:
            yield Unbalanced(of_group, of_values, of_keys)


def _ratio(pair: np.ndarray, noise: float) -> float | None:
    """The second of two numbers over the first, None where they are equal."""
    difference = abs(float(pair[1] - pair[0]))
    if difference <= max(UNEQUAL * float(np.abs(pair).max()), DEVIATIONS * noise):
        return None
    return float(pair[1] / pair[0]) if pair[0] else 0.0

"""Functions fused with the output layer that give its weight a gradient of another size than the hidden states'.

Of logits x W^T, <dx, x> and <dW, W> are equal, whatever is computed from them (probes/losses/head_backward.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gradcheck_dist.events import Event, HeadBackward
from gradcheck_dist.ledger.solve import EPSILON

OFF = {"float32": 0.01, "float64": 0.01}
"""Relative difference from which the weight's gradient is another one; ROUNDED of other types, for sums over many
chunks lose a tenth in bfloat16 (measured on 8000 x 64 and 512 chunks)."""
ROUNDED = 0.25
TELLS = 20
"""How many times what rounding does to the products these, and their difference, have to be."""


@dataclass(frozen=True)
class OwnHead:
    """Such a function, on one rank, in one step: its applications, the lowest and the highest `factors` by which the
    weight's gradient is off, and whether that undoes what arrived (`passed_by`)."""

    rank: int
    events: tuple[HeadBackward, ...]
    factors: tuple[float, float]
    passed_by: bool
    tolerance: float

    @property
    def first(self) -> HeadBackward:
        return self.events[0]

    @property
    def factor(self) -> float | None:
        """The one number by which it is off."""
        low, high = self.factors
        return (low + high) / 2 if abs(high - low) <= self.tolerance * max(abs(low), abs(high)) else None


def own_heads(events: Mapping[int, list[Event]]) -> Iterator[OwnHead]:
    """The functions of a step whose weight gets another gradient than the hidden states tell."""
    for rank, of_rank in events.items():
        found: dict[object, list[HeadBackward]] = defaultdict(list)
        for event in of_rank:
            if isinstance(event, HeadBackward):
                found[event.function, str(event.defined_at)].append(event)
        for alike in found.values():
            one = _judge(rank, alike)
            if one is not None:
                yield one


def _judge(rank: int, events: list[HeadBackward]) -> OwnHead | None:
    off: list[tuple[HeadBackward, float, float]] = []
    for event in events:
        arrived, of_rows, rows_norm, of_weight, weight_norm = np.frombuffer(event.values, np.float32).astype(np.float64)
        tolerance = OFF.get(event.dtype, ROUNDED)
        epsilon = EPSILON.get(event.dtype, EPSILON["bfloat16"])
        of_one = TELLS * epsilon * rows_norm
        rounding = of_one + TELLS * epsilon * weight_norm
        # Without any gradient of the weight it may be frozen, or be added elsewhere.
        if not np.isfinite([arrived, of_rows, of_weight, rounding]).all() or not weight_norm or not arrived:
            continue
        if abs(of_rows) <= of_one:
            continue
        if abs(of_weight - of_rows) <= max(rounding, tolerance * abs(of_rows)):
            if abs(arrived - 1) > tolerance:
                return None  # it is right where something else than 1 arrives
            continue
        off.append((event, float(of_weight / of_rows), float(arrived)))
    if not off:
        return None
    factors = [factor for _, factor, _ in off]
    tolerance = max(OFF.get(event.dtype, ROUNDED) for event, _, _ in off)
    by = all(abs(factor * arrived - 1) <= tolerance for _, factor, arrived in off)
    return OwnHead(rank, tuple(event for event, _, _ in off), (min(factors), max(factors)), by, tolerance)

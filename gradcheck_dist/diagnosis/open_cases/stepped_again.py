"""Optimizers that step more than once on the gradients of one step: the last reading is judged, and is not the only
one that moved parameters."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from gradcheck_dist.events import BEFORE, OptimizerStep
from gradcheck_dist.ledger.tracks import StepData

AGAIN = "on the gradients of the same passes"
SAME = 1e-6
"""Relative difference within which what was read twice is the same gradient."""


def stepped_again(data: StepData) -> list[str]:
    """Why a step is left open in which a parameter's gradient was read by several steps of optimizers, none of them
    inside of another's: a `step()` in a loop over parameters, or beside `scaler.step(optimizer)`."""
    most: list[OptimizerStep] = []
    changed = False
    for rank, events in data.events.items():
        readers: dict[int, list[OptimizerStep]] = defaultdict(list)
        for event in events:
            if isinstance(event, OptimizerStep) and event.inside is None:
                for param in data.params_of(rank, event.params):
                    readers[param].append(event)
        read = {
            track.param.id: {point.seq: point.values.data for point in track.points if point.role == BEFORE}
            for of_rank in data.tracks.values()
            if (track := of_rank.get(rank)) is not None
        }
        for param, steps in readers.items():
            values = [found for step in steps if (found := read.get(param, {}).get(step.seq)) is not None]
            if len(values) > 1:
                changed |= any(not _alike(values[0], other) for other in values[1:])
                most = max(most, steps, key=len)
    if not most:
        return []
    lines = list(dict.fromkeys(event.site.short for event in most if event.site is not None))
    where = f" at {' and '.join(lines[:2])}" if lines else ""
    between = "which were changed in between: only what the last one reads is judged"
    between = between if changed else "which applies them as often"
    return [
        f"optimizers step {len(most)} times{where} {AGAIN}, {between}. Usually "
        "there is one for each zero_grad(): it may stand in a loop, or beside scaler.step(optimizer)"
    ]


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return False
    size = float(np.nanmax(np.abs(one), initial=0.0))
    return bool(np.nanmax(np.abs(one - other), initial=0.0) <= SAME * size)

"""Passes in which a function that adds a parameter's gradient to `main_grad` by itself added nothing.

It hands autograd a placeholder, or nothing, so that nobody else adds the gradient either. A pass without tokens for it
(an expert) leaves nothing, too, but brings it no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gradcheck_dist.events import AddedByFunction, Backward
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track

FEWEST = 8
"""Elements of a gradient that have to show in another pass, where none shows in this one."""


class Unadded(NamedTuple):
    """A parameter and a pass on one rank."""

    param: ParamKey
    rank: int
    event: AddedByFunction


def unadded(data: StepData) -> Iterator[Unadded]:
    """The passes that brought a gradient to such a function and left nothing, where at least half of the sampled
    elements of the same gradient arrived in another pass of the step."""
    for key, of_rank in data.tracks.items():
        for rank, track in of_rank.items():
            if not any(_shows(values.data) for _, values in track.leaves.values()):
                continue
            for event in _arrived_at(data, track):
                if _is_empty(track, event):
                    yield Unadded(key, rank, event)


def backward_of(data: StepData, one: Unadded) -> Backward | None:
    """The pass in which it happened."""
    slot = (one.event.accumulation_step, one.event.microbatch)
    return next(
        (
            event
            for event in data.events[one.rank]
            if isinstance(event, Backward) and (event.accumulation_step, event.microbatch) == slot
        ),
        None,
    )


def _arrived_at(data: StepData, track: Track) -> Iterator[AddedByFunction]:
    """What tells that a gradient that is no zero arrived at a function of this parameter's."""
    for event in data.events[track.rank]:
        if isinstance(event, AddedByFunction):
            params, sizes = data.params_of(track.rank, event.params), np.frombuffer(event.values, np.float32)
            if len(params) == len(sizes) and dict(zip(params, sizes, strict=True)).get(track.param.id, 0.0) > 0:
                yield event


def _shows(values: np.ndarray) -> bool:
    held = values[np.isfinite(values)]
    return bool(2 * np.count_nonzero(held) >= max(len(held), 2 * FEWEST))


def _is_empty(track: Track, event: AddedByFunction) -> bool:
    _, values = track.leaves.get((event.accumulation_step, event.microbatch), (0, None))
    return values is None or not np.nan_to_num(values.data).any()

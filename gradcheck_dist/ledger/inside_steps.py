"""Reductions of gradients that an optimizer runs in its own step: distributed Muon and Adam (modded-nanogpt, nanochat),
which reduce, update a part each and gather the parameters."""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.events import AFTER, OptimizerStep, Reduce, StepEnd
from gradcheck_dist.ledger.tracks import StepData, Track


def reduced_inside(data: StepData, rank: int) -> Iterator[tuple[OptimizerStep, Reduce, frozenset[int]]]:
    """(step, reduction, which of the step's parameters it reduces), in the order in which they came. Without those that
    another step, inside of this one, reads behind it: there what came of them shows."""
    last = {
        param: event.seq
        for event in data.events[rank]
        if isinstance(event, OptimizerStep)
        for param in data.params_of(rank, event.params)
    }
    stepping: OptimizerStep | None = None
    mine: frozenset[int] = frozenset()
    for event in data.events[rank]:
        if isinstance(event, OptimizerStep):
            stepping, mine = event, frozenset(data.params_of(rank, event.params))
        elif isinstance(event, StepEnd):
            stepping = None
        elif isinstance(event, Reduce) and stepping is not None:
            params = frozenset(
                one for one in data.params_of(rank, event.params) if one in mine and last[one] <= stepping.seq
            )
            if params:
                yield stepping, event, params


def seen_inside(data: StepData, track: Track) -> frozenset[int]:
    """The numbers of the reductions inside of an optimizer's step that brought what it reads of a parameter, where
    their results were seen."""
    seen = {point.seq for point in track.points if point.role == AFTER}
    found = (event.seq for _, event, params in reduced_inside(data, track.rank) if track.param.id in params)
    return frozenset(seq for seq in found if seq in seen)


def reduced_to_others(data: StepData, track: Track) -> bool:
    """Whether the last reduction of a parameter inside of an optimizer's step gave its gradient to another rank, which
    steps it: what is left here nobody reads."""
    mine = [event for _, event, params in reduced_inside(data, track.rank) if track.param.id in params]
    return bool(mine) and mine[-1].root not in (None, track.rank)

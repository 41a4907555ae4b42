"""A matrix on one pipeline stage that began as another stage's embedding, and whose gradients nobody adds up."""

from __future__ import annotations

from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.tracks import ParamKey, StepData

MAYBE_TIED = "hold nothing else that tells one matrix from two of one seed"


def maybe_tied(data: StepData) -> list[str]:
    """Why it is open whether two matrices lack each other's gradient; [] where a reduction goes over both."""
    reasons = []
    for one, other in data.perhaps_tied:
        if not any(_reduced_together(data, mine, theirs) for mine, theirs in _holders(data, one, other)):
            reasons.append(
                f"{other[1]} began with the values of {one[1]}, one of them is an embedding's, and their stages "
                f"{MAYBE_TIED}. If they are one tied matrix, each lacks the gradient of the other, which no reduction "
                "adds"
            )
    return reasons


def _holders(data: StepData, one: ParamKey, other: ParamKey) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Each two ranks that hold one of both, as (rank, parameter id)."""
    mine, theirs = (
        [(rank, track.param.id) for rank, track in data.tracks[key].items() if track.leaves] for key in (one, other)
    )
    return [(here, there) for here in mine for there in theirs]


def _reduced_together(data: StepData, mine: tuple[int, int], theirs: tuple[int, int]) -> bool:
    return any(
        isinstance(event, Reduce)
        and {mine[0], theirs[0]} <= {*event.group, *event.replicate_group}
        and (id in (params := data.params_of(rank, event.params)) or not params)
        for rank, id in (mine, theirs)
        for event in data.events[rank]
    )

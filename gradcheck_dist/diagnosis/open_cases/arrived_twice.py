"""Gradients that arrive at their parameters two times in one pass, bit by bit the same."""

from __future__ import annotations

from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Backward
from gradcheck_dist.ledger.tracks import StepData


def arrived_twice(data: StepData) -> list[str]:
    """Why a step is left open in whose passes backward functions brought parameters one gradient twice: a checkpoint by
    hand that runs its backward pass twice does so, and so does a model that calls a module twice on the same input."""
    tracks = [(name, rank, one) for (_, name), of_rank in data.tracks.items() for rank, one in of_rank.items()]
    found = {(name, rank, slot) for name, rank, track in tracks for slot in track.twice}
    if not found:
        return []
    rank, slot = min((rank, slot) for _, rank, slot in found)
    passes = (event for event in data.events[rank] if isinstance(event, Backward))
    site = next((one.site for one in passes if (one.accumulation_step, one.microbatch) == slot), None)
    where = f" at {site.short}" if site is not None else ""
    names = in_short(sorted({name for name, _, _ in found}))
    return [
        f"in the backward{where} functions that run a backward pass of their own (a checkpoint by hand) bring {names} "
        "one gradient two times, bit by bit: right where a module is called twice on the same input, and x 2 where "
        "such a function runs its pass twice, or accumulates and returns it"
    ]

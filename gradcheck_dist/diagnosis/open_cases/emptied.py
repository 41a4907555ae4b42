"""Gradients that the trainer takes away from some parameters before the optimizer comes."""

from __future__ import annotations

import numpy as np

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import BEFORE, Clip, GradientNorm, OptimizerStep
from gradcheck_dist.ledger.tracks import StepData


def frozen(case: Case, data: StepData) -> str | None:
    """Why parameters that the trainer leaves without a gradient accuse nobody."""
    if not _taken_away(case, data):
        return None
    names = sorted({held.param[1] for held in case.held})
    shown = in_short(names)
    event = case.culprit.event
    site = event.site if event is not None else None
    where = f" after {site.short}" if site is not None else ""
    return (
        f"{shown}: the gradient arrives, but `.grad` is empty (None or zeros) when the optimizer comes. Lines of the "
        f"trainer's{where} take it away on all ranks, so that these parameters stay as they are: where a layer is "
        "frozen for a while, that is meant, and whether it is is not known"
    )


def _taken_away(case: Case, data: StepData) -> bool:
    """Whether some parameters were given no gradient by lines of the trainer's: behind all that was recorded `.grad`
    is None, or all zeros, on every rank that holds them, and the optimizer steps others that have one. So layers are
    frozen for a while (DINO's last layer in its first epoch). No wrong constant and no reduction leaves that behind."""
    culprit = case.culprit
    if not culprit.unrecorded or not isinstance(culprit.before, OptimizerStep | Clip | GradientNorm):
        return False
    holders = {(held.param, rank) for held in case.held for rank in held.ranks}
    if any((held.param, rank) not in holders for held in case.held for rank in data.tracks[held.param]):
        return False  # copies that part are told
    if not all(held.is_gone for held in case.held):
        return False
    return all(_stepped_over(held.param, rank, data) for held in case.held for rank in held.ranks)


def _stepped_over(param: tuple[int, str], rank: int, data: StepData) -> bool:
    """Whether the one optimizer of a parameter found nothing in its `.grad`, and gradients in others. What steps inside
    of another's step reads last."""
    ids = {key: of_rank[rank].param.id for key, of_rank in data.tracks.items() if rank in of_rank}
    steps = [
        (event, listed)
        for event in data.events[rank]
        if isinstance(event, OptimizerStep) and ids[param] in (listed := set(data.params_of(rank, event.params)))
    ]
    if sum(event.inside is None for event, _ in steps) != 1:
        return False
    last, listed = steps[-1]
    read = {
        key: bool(np.nan_to_num(point.values.data).any())
        for key in ids
        if ids[key] in listed
        for point in data.tracks[key][rank].points
        if point.seq == last.seq and point.role == BEFORE
    }
    return any(read.values()) and (not read[param] if param in read else bool(last.grads_missing))

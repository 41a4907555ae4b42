"""Gradients that stay on some ranks because parameters are averaged in their place, by torch's own documentation."""

from __future__ import annotations

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.cells import Cell
from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.tracks import StepData

HOOK = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.post_localSGD_hook"


def post_local_sgd(case: Case, data: StepData) -> str | None:
    """Why weights accuse nobody where contributions never came: behind its first steps this hook reduces over some."""
    hooks = {event.hook for events in data.events.values() for event in events if isinstance(event, Reduce)}
    if HOOK not in hooks or not all(any(map(_is_gone, held.cells)) for held in case.held):
        return None
    return (
        "the gradients of other ranks do not come: from start_localSGD_iter on post_localSGD_hook reduces over its "
        "subgroup alone, and parameters are to be averaged in their place (PostLocalSGDOptimizer), which is not "
        "followed. Record steps before it to have the rest judged"
    )


def _is_gone(cell: Cell) -> bool:
    return abs(cell.ratio) <= cell.margin

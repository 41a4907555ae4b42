"""Parameters that a rank may have for itself, though they began as copies do: experts that were drawn from one seed."""

from __future__ import annotations

from gradcheck_dist.diagnosis.case import Case
from gradcheck_dist.ledger.tracks import StepData


def may_be_experts(case: Case, data: StepData) -> bool:
    """Whether gradients that were not reduced are those of parameters that are called between exchanges of activations
    (all-to-all), where nothing is called whose gradients are reduced. Such a parameter gets all ranks' tokens without
    any reduction; the norms of a sequence-parallel model stand beside what is reduced."""
    if not case.culprit.absent or case.everywhere:
        return False
    own = {held.param for held in case.held}
    mine: set[int] = set()
    others: set[int] = set()
    for key, of_rank in data.tracks.items():
        for track in of_rank.values():
            count, ranks = track.exchanges or (0, ())
            (mine if key in own else others).add(count)
            if key in own and (not count or not of_rank.keys() <= set(ranks)):
                return False
    return bool(mine) and mine.isdisjoint(others)


def not_known(case: Case) -> str:
    names = sorted({held.param[1] for held in case.held})
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"the gradients of {shown} are not reduced and began alike on all ranks, and ranks exchange activations before "
        "and after their modules are called: experts that were drawn from one seed need no reduction, copies do. Draw "
        "experts from a seed of their own on each rank, which they need to become different, and this is told"
    )

"""A head of which each rank holds a part, on what it gathered from all ranks: all of them compute one loss."""

from __future__ import annotations

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.exchanges import GATHER, Passed, passed
from gradcheck_dist.ledger.tracks import StepData

NEAR = 1e-3
PARTED = "whose backward may multiply by that number, too"


def parted_head(case: Case, data: StepData) -> str | None:
    """Why parameters that nobody reduces, with as many times the weight of others as ranks average these, accuse
    nobody: a gather in front of them multiplies what goes on to the others by that number, which undoes the average.
    Each rank has the whole gradient of its own part then. A part may have been drawn from the others' seed."""
    if not case.culprit.absent or not case.context.relative:  # of losses that count tokens values tell
        return None
    one = next((one for one in undoing_gathers(data) if _makes_up_for(one, case)), None)
    if one is None:
        return None
    names, times = in_short(sorted({held.param[1] for held in case.held})), f"x {len(one.ranks)}"
    name = one.first.function or one.first.collectives[0]
    where = f" ({one.first.site.short})" if one.first.site is not None else ""
    return (
        f"the gradients of {names} are not reduced, and {times} of their share where others are averaged. They may be "
        f"computed on what {name}{where} gathers, {PARTED}: right where each rank holds its own part of a head whose "
        "loss all ranks compute together, also where parts were drawn from one seed, and wrong of copies"
    )


def undoing_gathers(data: StepData) -> list[Passed]:
    """Gathers of activations whose backward multiplies by the number of ranks, or does what is no number."""
    return [
        one
        for one in passed(data.events)
        if one.forward == GATHER
        and (one.outcome == "other" or (one.outcome == "scaled" and abs(one.factor / len(one.ranks) - 1) <= NEAR))
    ]


def _makes_up_for(one: Passed, case: Case) -> bool:
    ranks, place = set(one.ranks), case.context.contributions.coordinate
    near = max(NEAR, case.pattern.tolerance)
    for held, cell in case.cells:
        own = cell.key[0] == place.get(held.rank)
        right = abs(cell.ratio / len(ranks) - 1) <= near if own else abs(cell.ratio) <= near
        if held.rank not in ranks or not right:
            return False
    return bool(case.cells)

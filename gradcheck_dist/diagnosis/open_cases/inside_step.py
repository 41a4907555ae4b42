"""Gradients that are combined over ranks where nobody follows them: inside of an optimizer's own step, or in the
backward of a function that combines parameters."""

from __future__ import annotations

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.events import GATHERED, Event, OptimizerStep, Reduce, Replica, StepEnd
from gradcheck_dist.ledger.tracks import StepData


def reduced_inside(case: Case, data: StepData) -> str | None:
    """Why a reduction that never came accuses nobody, and neither a factor that what comes inside may divide by."""
    if case.culprit.absent:
        return stepped_together(data)
    too_large = case.pattern.kind == "uniform" and case.pattern.factor > 1 and not case.terms
    reason = stepped_together(data) if too_large and _are_own_alone(case) else None
    return (
        reason
        and f"each rank's own passes weigh x {case.pattern.factor:.6g} when the optimizer reads them, and {reason}"
    )


def _are_own_alone(case: Case) -> bool:
    """Whether the gradients that optimizers read hold nothing of other ranks' passes."""
    place = case.context.contributions.coordinate
    others = [cell for held in case.held for cell in held.cells if cell.key[0] != place.get(held.rank, held.rank)]
    return bool(others) and all(abs(cell.ratio) <= cell.margin for cell in others)


def gathered_otherwise(_: Case, data: StepData) -> str | None:
    """Why nothing is laid to anybody where what arrives at some parameters is a sum over ranks that nobody follows."""
    return next(iter(data.told(GATHERED)), None)


def stepped_together(data: StepData) -> str | None:
    """Why ranks whose gradients nothing joins before their optimizers read them may be right all the same: these reduce
    them inside of `step`, or something else there (momentum, compressed updates), as their parameters show, which were
    moved and are equal afterwards. None where nothing tells of it."""
    inside = [_reduced_inside(data, rank, events) for rank, events in data.events.items()]
    reduced = [event for event in inside if event is not None]
    if len(reduced) == len(inside) > 1:
        site = reduced[0].site
        line = f" at {site.short}" if site is not None else ""
        how = f"gradients are reduced{line} when the optimizer has begun its step"
    elif _moved_alike(data):
        how = "no gradient is reduced before the optimizer reads it, and yet it moves the parameters alike on all ranks"
    else:
        return None
    return f"{how}: what it combines over ranks is not followed, so how much they weigh in its update is not judged"


def _reduced_inside(data: StepData, rank: int, events: list[Event]) -> Reduce | None:
    """A reduction of gradients that an optimizer ran between the begin and the end of its own step."""
    mine: set[int] | None = None  # the parameters of the optimizer that is stepping
    for event in events:
        if isinstance(event, OptimizerStep):
            mine = set(data.params_of(rank, event.params))
        elif isinstance(event, StepEnd):
            mine = None
        elif isinstance(event, Reduce) and mine and not mine.isdisjoint(data.params_of(rank, event.params)):
            return event
    return None


def _moved_alike(data: StepData) -> bool:
    """Whether parameters were equal on all ranks, were changed in this step and are equal again behind its optimizer,
    and no gradient was reduced: of many parameters a few are looked at, and one that was left out may not be one."""
    before, after = (
        [{e.fingerprint for e in events if isinstance(e, Replica) and e.after is when and not e.num_steps_later}
         for events in data.events.values()] for when in (False, True))  # fmt: skip
    return (
        len(data.events) > 1
        and not any(isinstance(event, Reduce) for events in data.events.values() for event in events)
        and all(len(one) == 1 for one in [*before, *after])
        and len(set.union(*before)) == len(set.union(*after)) == 1
        and before[0] != after[0]
    )

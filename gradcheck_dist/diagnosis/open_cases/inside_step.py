"""Gradients that are combined over ranks where nobody follows them: inside of an optimizer's own step, or in the
backward of a function that combines parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import GATHERED, OptimizerStep, Reduce, Replica
from gradcheck_dist.ledger import inside_steps
from gradcheck_dist.ledger.param_updates import moved_alike
from gradcheck_dist.ledger.tracks import ParamKey, StepData

NOT_FOLLOWED = "what it combines over ranks is not followed, so how much they weigh in its update is not judged"


def reduced_inside(case: Case, data: StepData) -> str | None:
    """Why a reduction that never came accuses nobody, and neither a factor that what comes inside may divide by."""
    followed = [held for held in case.held if held.replay.inside.get(held.rank)]
    if case.culprit.absent and len(followed) < len(case.held):
        return _stepped_together(case, data)
    if followed:
        return _divided_behind(case, followed[0], data)
    too_large = case.pattern.kind == "uniform" and case.pattern.factor > 1
    place = case.context.contributions.coordinate
    reason = (
        _stepped_together(case, data) if too_large and all(is_own_alone(held, place) for held in case.held) else None
    )
    return (
        reason
        and f"each rank's own passes weigh x {case.pattern.factor:.6g} when the optimizer reads them, and {reason}"
    )


def _divided_behind(case: Case, one: Held, data: StepData) -> str | None:
    """An optimizer that reduces gradients in its own step may divide what came; it multiplies by nothing."""
    place = case.context.contributions.coordinate
    unfollowed = (held for held in case.held if not held.replay.inside.get(held.rank))
    if not all(is_own_alone(held, place) for held in unfollowed):
        return None
    if not all(_is_too_large(held) for held in case.held if held.replay.inside.get(held.rank)):
        return None
    inside = one.replay.inside[one.rank]
    step, event, _ = next(found for found in inside_steps.reduced_inside(data, one.rank) if found[1].seq in inside)
    line = f" ({event.site.short})" if event.site is not None else ""
    return (
        f"all weights are x {one.cells[0].ratio:.6g} behind the reduction that {step.optimizer} runs in its own "
        f"step{line}: whether it divides by that number as it updates parameters is not known. Divide the loss or what "
        "is reduced, and not the result, to have that judged"
    )


def _is_too_large(held: Held) -> bool:
    """Whether all weights are one and the same, and above 1."""
    first = held.cells[0]
    return first.ratio > 1 + first.margin and all(
        abs(cell.ratio - first.ratio) <= cell.margin + first.margin for cell in held.cells
    )


def is_own_alone(held: Held, place: Mapping[int, int]) -> bool:
    """Whether the gradient that an optimizer reads holds nothing of other ranks' passes."""
    others = [cell for cell in held.cells if cell.key[0] != place.get(held.rank, held.rank)]
    return bool(others) and all(abs(cell.ratio) <= cell.margin for cell in others)


def gathered_otherwise(_: Case, data: StepData) -> str | None:
    """Why nothing is laid to anybody where what arrives at some parameters is a sum over ranks that nobody follows."""
    return next(iter(data.told(GATHERED)), None)


def _stepped_together(case: Case, data: StepData) -> str | None:
    return stepped_together(data) or moved_together(data, {held.param for held in case.held})


def moved_together(data: StepData, keys: Collection[ParamKey]) -> str | None:
    """Why parameters of which each rank's optimizer reads its own gradient may be right beside others that are reduced:
    it moves them alike, so it combines something else over ranks."""
    if _have_one_owner(data) or not moved_alike(data, keys):
        return None
    names = in_short(sorted(name for _, name in keys))
    return (
        f"no gradient of {names} is reduced before the optimizer reads it, and yet it moves these alike on all ranks: "
        f"{NOT_FOLLOWED}"
    )


def stepped_together(data: StepData) -> str | None:
    """Why ranks whose gradients nothing joins before their optimizers read them may be right all the same: these reduce
    them inside of `step`, or something else there (momentum, compressed updates), as their parameters show, which were
    moved and are equal afterwards. None where nothing tells of it."""
    inside = [next(inside_steps.reduced_inside(data, rank), None) for rank in data.events]
    reduced = [event for _, event, _ in filter(None, inside)]
    if len(reduced) == len(inside) > 1:
        site = reduced[0].site
        line = f" at {site.short}" if site is not None else ""
        how = f"gradients are reduced{line} when the optimizer has begun its step"
    elif _moved_alike(data):
        how = "no gradient is reduced before the optimizer reads it, and yet it moves the parameters alike on all ranks"
    else:
        return None
    return f"{how}: {NOT_FOLLOWED}"


def _moved_alike(data: StepData) -> bool:
    """Whether parameters were equal on all ranks, were changed in this step and are equal again behind its optimizer,
    and no gradient was reduced: of many parameters a few are looked at, and one that was left out may not be one."""
    looks = [
        [event for event in events if isinstance(event, Replica) and not event.num_steps_later]
        for events in data.events.values()
    ]
    before = {one.fingerprint for of_rank in looks for one in [e for e in of_rank if not e.after][:1]}
    # Of several optimizers each ends with a look: the last one shows what all of them did.
    after = {one.fingerprint for of_rank in looks for one in [e for e in of_rank if e.after][-1:]}
    return (
        len(looks) > 1
        and not _have_one_owner(data)
        and all(any(e.after for e in of_rank) and not all(e.after for e in of_rank) for of_rank in looks)
        and not any(isinstance(event, Reduce) for events in data.events.values() for event in events)
        and len(before) == len(after) == 1
        and before != after
    )


def _have_one_owner(data: StepData) -> bool:
    """Whether each parameter is stepped on one rank alone, by an optimizer inside of another one that sends it to the
    others (ZeroRedundancyOptimizer): what moves it is what that one reads."""
    stepped = {
        rank: {
            param
            for event in events
            if isinstance(event, OptimizerStep) and event.inside is not None
            for param in data.params_of(rank, event.params)
        }
        for rank, events in data.events.items()
    }
    owners = [sum(track.param.id in stepped[rank] for rank, track in held.items()) for held in data.tracks.values()]
    return bool(owners) and all(num == 1 for num in owners)

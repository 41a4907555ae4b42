"""What may still have become of a gradient after it was last seen."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.causes.case import Case, factor_in_words
from gradcheck_dist.diagnosis.norms.clips import is_round
from gradcheck_dist.diagnosis.open_cases.inside_step import is_own_alone
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import OWN_OPTIMIZER, OptimizerStep, Reduce, Replica
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.wording import numbered

EXACT = 1e-6
"""Relative: how near a number that somebody wrote must be."""
OTHER_PARTS = "in .grad the other parts are what they were before"
HANDED_ON = (
    "behind the step ranks hand on what they stepped, and parameters are alike when the next one begins, so what other "
    "parts gave is overwritten: which parts each hands on is not followed"
)


def not_read_yet(case: Case, data: StepData) -> str | None:
    """Why a factor on all weights accuses nobody: what came after the gradient was last seen is not known."""
    if not _may_be_made_up(case, data):
        return None
    words = factor_in_words(case)
    named = f" = {words}" if case.names else ""
    if data.complete and not own_optimizer(data):
        return (
            f"all weights are x {case.pattern.factor:.6g}{named} in .grad, and {_holder(case, data)}: whether it "
            "divides by that number as it updates parameters is not known. Divide the loss or .grad by it, and not the "
            "update, to have that judged"
        )
    if data.complete:
        return (
            f"all weights are x {case.pattern.factor:.6g}{named} in .grad, and what steps is no optimizer of "
            "torch.optim: whether it divides by that number as it updates parameters is not known. Divide the loss "
            "or .grad by it, and not the update, to have that judged"
        )
    ranks = sorted({rank for held in case.held for rank in held.ranks})
    on = "" if data.events.keys() <= {*ranks} else f" on {numbered('rank', ranks)}"
    return (
        f"all weights{on} are x {case.pattern.factor:.6g}{named} so far: whether more was to come before the "
        "optimizer is not known"
    )


def _may_be_made_up(case: Case, data: StepData) -> bool:
    """Whether one factor on all weights may be right in the end.

    Where the optimizer was never seen to come, further contributions, or a division by hand, could have. An optimizer
    of the trainer's own may divide as it updates (`p -= lr / batch_size * p.grad`), and one that is none of torch.optim
    by a number that it holds (accumulation steps, a scale); none multiplies.
    """
    if case.pattern.kind != "uniform" or not case.everywhere:
        return False
    if not data.complete:
        return True
    return case.pattern.factor > 1 and (own_optimizer(data) or bool(_holder(case, data)))


def turned_round(case: Case, data: StepData) -> str | None:
    """Why gradients of the negative loss accuse nobody: what steps is told to maximize, or is none of torch.optim and
    may add what it reads."""
    if case.pattern.kind != "uniform" or not case.everywhere or case.pattern.factor >= 0:
        return None
    steps = [event for of_rank in data.events.values() for event in of_rank if isinstance(event, OptimizerStep)]
    if not steps or not (own_optimizer(data) or all(_maximizes(step) for step in steps)):
        return None
    return (
        f"all weights are x {case.pattern.factor:.6g} in .grad: what steps maximizes, or may, as it is no optimizer of "
        "torch.optim, and then the negative of the loss is right"
    )


def _maximizes(step: OptimizerStep) -> bool:
    groups = [group.hyperparameters for group in step.groups] or [step.hyperparameters]
    return all(numbers.get("maximize") == 1.0 for numbers in groups)


def _holder(case: Case, data: StepData) -> str:
    """The optimizer that holds the number by which all weights are too large, or one that clips them as well, in words;
    "" where one that steps does not, or another one reads what it leaves."""
    words = ""
    for of_rank in data.events.values():
        for step in (event for event in of_rank if isinstance(event, OptimizerStep)):
            allowed = max(2 * case.pattern.tolerance, EXACT)
            names = [
                f"holds that number ({name} = {number:g})"
                for name, number in step.numbers.items()
                if number and min(abs(one / case.pattern.factor - 1) for one in (number, 1 / number)) <= allowed
            ] or [
                f"holds {name} = {number:.6g}, over which the norm of all gradients is {left:.2g}, as a clip that acts "
                "leaves it"
                for name, number in step.numbers.items()
                if (left := _clipped_to(case, number)) is not None
            ]
            if not names:
                return ""
            words = f"{step.optimizer}, which is none of torch.optim, {names[0]}"
    return words


def _clipped_to(case: Case, number: float) -> float | None:
    """The norm that gradients have over a number which is a loss scale over the factor of a clip, as fused optimizers
    are given it (`step(scale=scale / clip)`); None where it is none that somebody wrote, or no clip shortens so."""
    norm = case.norms.of_model() if case.norms is not None else None
    if norm is None or number < case.pattern.factor:
        return None
    return norm / number if is_round(norm / number) else None


def read_elsewhere(case: Case, data: StepData) -> str | None:
    """Why a reduction whose result is not in `.grad` accuses nobody: what steps is none of torch.optim, and may read
    that result where it lies (a flat buffer). One that read `.grad` would have moved copies apart."""
    aside = [held.replay.unwritten.get(held.rank) for held in case.held]
    first = next((event for event in aside if event is not None), None)
    if first is None or not all(aside) or not own_optimizer(data):
        return None
    if not _left_alike(data):
        return None
    line = f" at {first.site.short}" if first.site is not None else ""
    return (
        f"gradients are reduced{line} and the result is not in .grad, but what steps is no optimizer of torch.optim, "
        "and parameters are alike on all ranks behind it: what it reads is not known. Write what was reduced back into "
        ".grad to have that judged"
    )


def other_parts(case: Case, data: StepData) -> str | None:
    """Why gradients that hold nothing of other ranks behind a reduce-scatter accuse nobody: each rank has its part of
    what is summed, and may leave the others' parts as they were. A rank that stepped by these would have moved copies
    apart, unless parameters are handed on behind the step; whether they are shows when the next one begins."""
    if _left_alike(data):
        behind = (
            "parameters are alike on all ranks behind the step, so nobody stepped by these alone: what steps, and by "
            "which parts, is not followed"
        )
        return _of_other_parts(case, data, behind)
    return _of_other_parts(case, data, HANDED_ON) if begun_alike(data, handed_on=True) else None


def parts_handed_on(cases: Sequence[Case], data: StepData) -> str:
    """What all these cases are if ranks hand on behind the step what each stepped by its own part of a reduction; ""
    where some are none of the kind."""
    found = {_of_other_parts(case, data, HANDED_ON) for case in cases}
    return (found.pop() or "") if len(found) == 1 else ""


def _of_other_parts(case: Case, data: StepData, behind: str) -> str | None:
    place = case.context.contributions.coordinate
    first = _scattered(case.held[0], data)
    if first is None or not all(_scattered(held, data) and is_own_alone(held, place) for held in case.held):
        return None
    if any(_all_of(first.group, param, case) for param in {held.param for held in case.held}):
        return None
    line = f" at {first.site.short}" if first.site is not None else ""
    return (
        f"of what is reduced{line} each rank has its own part, and {OTHER_PARTS}; {behind}. Empty the parts of other "
        "ranks, or write what was reduced into a tensor that the optimizer steps by, to have that judged"
    )


def _scattered(held: Held, data: StepData) -> Reduce | None:
    """The reduce-scatter that came last to a gradient; None where something else did."""
    track = data.tracks.get(held.param, {}).get(held.rank)
    if track is None:
        return None
    of_param = [
        event
        for event in data.events[held.rank]
        if isinstance(event, Reduce) and track.param.id in data.params_of(held.rank, event.params)
    ]
    return of_param[-1] if of_param and of_param[-1].impl == "reduce_scatter" else None


def _all_of(group: tuple[int, ...], param: ParamKey, case: Case) -> bool:
    """Whether the reduction's result came to no rank."""
    return set(group) <= {rank for held in case.held if held.param == param for rank in held.ranks}


def _left_alike(data: StepData) -> bool:
    """Whether parameters are equal on all ranks behind the step, as far as they are looked at."""
    left = {
        next((e.fingerprint for e in reversed(events) if isinstance(e, Replica) and e.after), None)
        for events in data.events.values()
    }
    return len(left) == 1 and None not in left


def begun_alike(data: StepData, *, handed_on: bool = False) -> bool | None:
    """Whether parameters were equal on all ranks when the step began, as far as they are looked at; None where nobody
    looked. `handed_on`: what other ranks sent made them so behind an optimizer."""
    begun = {
        rank: next((e for e in events if isinstance(e, Replica) and not e.after), None)
        for rank, events in data.events.items()
    }
    seen = [event for event in begun.values() if event is not None]
    if len(begun) < 2 or len(seen) < len(begun):
        return None
    return len({event.fingerprint for event in seen}) == 1 and (not handed_on or all(event.exchanged for event in seen))


def own_optimizer(data: StepData) -> bool:
    """Whether what steps is no optimizer of torch.optim."""
    steps = [event for of_rank in data.events.values() for event in of_rank if isinstance(event, OptimizerStep)]
    return any(event.optimizer == OWN_OPTIMIZER for event in steps)

"""Steps with another number of passes than the right ones, whose losses divide by theirs all the same.

Where the batches of an epoch do not fill its last window, either that window is short, or it is left unfinished and its
gradients stay for the next epoch's first one. Its numbers alone may be made of others as well (two degrees, an average
too many); that all steps with the usual number of passes came out right tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import msgspec

from gradcheck_dist.diagnosis.finding import Factor, Finding
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause
from gradcheck_dist.wording import plural

LOSS_RULE = "GS303"
EXACT = 1e-3
"""Relative; K / K' of a few passes lie further apart."""
BEFORE = "as many as the step before had, in this step as in the others that are wrong: a count that is a step old"
COUNT_ANEW = "Divide the loss by the number of passes of its own step."
FIRST = "the first step: a condition such as `i % K == 0` holds before K passes are through"


def tell_windows(verdicts: Sequence[StepVerdict]) -> None:
    """Give the findings of such steps one cause."""
    if before := _of_the_step_before(verdicts):
        for verdict, passes in before:
            _tell(verdict, passes, BEFORE, COUNT_ANEW)
        return
    right = [verdict for verdict in verdicts if verdict.weights and not verdict.findings and not verdict.reasons]
    usual = {verdict.context.num_accumulation for verdict in right}
    if len(usual) != 1:
        return
    (passes,) = usual
    for verdict in verdicts:
        num = verdict.context.num_accumulation
        if verdict.errors and num != passes and all_off_by(verdict, num / passes):
            why, fix = why_and_fix(verdict.context.step, short=num < passes)
            _tell(verdict, passes, f"which is right in the steps with {passes} passes: {why}", fix)


def _of_the_step_before(verdicts: Sequence[StepVerdict]) -> list[tuple[StepVerdict, int]]:
    """The wrong steps, each with the passes of the step before, where the losses of all steps divide by these."""
    steps = [verdict for verdict in verdicts if verdict.weights]
    found = [
        (verdict, before.context.num_accumulation)
        for before, verdict in pairwise(steps)
        if verdict.context.step == before.context.step + 1 and verdict.errors
    ]
    changed = [pair for pair in found if all_off_by(pair[0], pair[0].context.num_accumulation / pair[1])]
    wrong = sum(bool(verdict.errors) for verdict in steps)
    several = len({passes for _, passes in changed}) > 1
    return changed if several and len(changed) == wrong else []


def _tell(verdict: StepVerdict, passes: int, why: str, fix: str) -> None:
    """Lay all that is wrong in a step to the loss, which divides by so many passes."""
    errors = verdict.errors
    at_loss = next((one for one in errors if one.code == LOSS_RULE and one.first_event is not None), None)
    if at_loss is not None:
        effects = [verdict.effects.pop(cause(one), None) for one in errors]
        told = _one(at_loss, verdict, passes, why, fix, at_loss.consequence if len(errors) == 1 else "")
        verdict.findings = [told, *(finding for finding in verdict.findings if finding not in errors)]
        if len(errors) == 1 and effects[0] is not None:
            verdict.effects[cause(told)] = effects[0]


def all_off_by(verdict: StepVerdict, ratio: float) -> bool:
    known = [weight.ratio for weight in verdict.weights if weight.ratio is not None]
    return bool(known) and all(abs(one / ratio - 1) <= EXACT for one in known)


def why_and_fix(step: int, *, short: bool) -> tuple[str, str]:
    """Why a step has fewer passes (`short`), or more, than others, and what to do about it."""
    if short:
        return (
            f"the window is a short one ({FIRST if step == 0 else 'the end of an epoch'})",
            "Divide the loss by the number of passes of its own window, or leave the short window out.",
        )
    return (
        "gradients of a window that was not finished (the end of an epoch) were left in",
        "Step the optimizer with what an unfinished window holds, divided by its own number of passes, or empty the "
        "gradients before the next window begins.",
    )


def _one(found: Finding, verdict: StepVerdict, usual: int, why: str, fix: str, consequence: str) -> Finding:
    passes = verdict.context.num_accumulation
    ratio = Fraction(passes, usual)
    factor = float(ratio)
    number = f"{passes} backward passes add" if passes > 1 else "One backward pass adds"
    assert found.first_event is not None
    return msgspec.structs.replace(
        found,
        factor=Factor(observed=factor, exact=str(ratio), tolerance=found.factor.tolerance),
        pattern=f"every contribution x {factor:.6g}, in a step of {plural(passes, 'pass')} instead of {usual}",
        units=sorted(set(verdict.units.values())),
        num_parameters=len(verdict.units),
        ranks=sorted({rank for held in verdict.held if held.cells for rank in held.ranks}),
        first_event=msgspec.structs.replace(found.first_event, observed_factor=factor),
        explanation=f"{number} up in this step, and the loss divides by {usual}, {why}.",
        fix=fix,
        suggested_experiment=None,
        consequence=consequence,
    )

"""Steps with another number of passes than the right ones, whose losses divide by theirs all the same.

Where the batches of an epoch do not fill its last window, either that window is short, or it is left unfinished and its
gradients stay for the next epoch's first one. Its numbers alone may be made of others as well (two degrees, an average
too many); that all steps with the usual number of passes came out right tells, or right but for means of means.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod

import msgspec

from gradcheck_dist.diagnosis.finding import Factor, Finding
from gradcheck_dist.diagnosis.rules import gs101_double_averaging as double_averaging
from gradcheck_dist.diagnosis.rules import gs301_mean_of_means as of_means
from gradcheck_dist.diagnosis.rules import gs303_wrong_normalizer as wrong_normalizer
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause
from gradcheck_dist.wording import plural

LOSS_RULE = wrong_normalizer.CODE
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
        if not usual:
            _tell_beside_means(verdicts)
        return
    (passes,) = usual
    wrong = [
        verdict
        for verdict in verdicts
        if verdict.errors and verdict.context.num_accumulation not in (passes, 0)
        if all_off_by(verdict, verdict.context.num_accumulation / passes)
    ]
    if passes == 1 and len(wrong) >= len(right):
        return  # what nobody divides is right in steps of one pass: these are the short ones
    for verdict in wrong:
        why, fix = why_and_fix(verdict.context.step, short=verdict.context.num_accumulation < passes)
        _tell(verdict, passes, f"which is right in the steps with {passes} passes: {why}", fix)


def _tell_beside_means(verdicts: Sequence[StepVerdict]) -> None:
    """The same where the steps with the usual number of passes add up means of each pass's own tokens, and are wrong in
    nothing else. What these are found to be stays with them."""
    times = [(verdict, number) for verdict in verdicts if (number := _times_means(verdict)) is not None]
    full = [
        verdict
        for verdict, number in times
        if [one.code for one in verdict.errors] == [of_means.CODE] and abs(number - 1) <= EXACT
    ]
    usual = {verdict.context.num_accumulation for verdict in full}
    if len(usual) != 1 or usual == {1}:
        return
    (passes,) = usual
    for verdict, number in times:
        num = verdict.context.num_accumulation
        if num == passes or abs(number * passes / num - 1) > EXACT:
            continue
        why, fix = why_and_fix(verdict.context.step, short=num < passes)
        at_loss = next(one for one in verdict.errors if one.first_event is not None and one.first_event.kind == "loss")
        found = msgspec.structs.replace(at_loss, code=LOSS_RULE, name=wrong_normalizer.NAME, severity="error")
        why = f"as is right for the means of the steps with {passes} passes: {why}"
        for one in verdict.errors:
            verdict.take_away(one)
        verdict.findings.insert(0, _one(found, verdict, passes, why, fix, ""))


def _times_means(verdict: StepVerdict) -> float | None:
    """By what the losses of a step, or a recorded reduction, multiply means of its passes' own tokens, where that is
    all that is wrong in it. A single pass has one such mean."""
    errors = verdict.errors
    shapes = [shape for one in errors if (shape := verdict.shape_of(one)) is not None]
    at_loss = [one for one in errors if one.first_event is not None and one.first_event.kind == "loss"]
    kinds = {of_means.CODE: "objective", LOSS_RULE: "uniform", double_averaging.CODE: "uniform"}
    if not at_loss or len(shapes) != len(errors):
        return None
    if any(kinds.get(one.code) != shape.kind for one, shape in zip(errors, shapes, strict=True)):
        return None
    return prod(shape.factor for shape in shapes)


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

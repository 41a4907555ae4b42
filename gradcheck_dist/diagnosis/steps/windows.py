"""Steps with another number of passes than the right ones, whose losses divide by theirs all the same.

Where the batches of an epoch do not fill its last window, either that window is short, or it is left unfinished and its
gradients stay for the next epoch's first one. Its numbers alone may be made of others as well (two degrees, an average
too many); that all steps with the usual number of passes came out right tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from gradcheck_dist.diagnosis.finding import Factor, Finding
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause
from gradcheck_dist.wording import plural

LOSS_RULE = "GS303"
EXACT = 1e-3
"""Relative; K / K' of a few passes lie further apart."""
FIRST = "the first step: a condition such as `i % K == 0` holds before K passes are through"


def tell_windows(verdicts: Sequence[StepVerdict]) -> None:
    """Give the findings of such steps one cause."""
    right = [verdict for verdict in verdicts if verdict.weights and not verdict.findings and not verdict.reasons]
    usual = {verdict.context.num_accumulation for verdict in right}
    if len(usual) != 1:
        return
    (passes,) = usual
    for verdict in verdicts:
        errors = verdict.errors
        ratio = Fraction(verdict.context.num_accumulation, passes)
        if not errors or ratio == 1 or not all_off_by(verdict, float(ratio)):
            continue
        at_loss = next((one for one in errors if one.code == LOSS_RULE and one.first_event is not None), None)
        if at_loss is not None:
            effects = [verdict.effects.pop(cause(one), None) for one in errors]
            told = _one(at_loss, verdict, passes, ratio, at_loss.consequence if len(errors) == 1 else "")
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


def _one(found: Finding, verdict: StepVerdict, usual: int, ratio: Fraction, consequence: str) -> Finding:
    passes, factor = verdict.context.num_accumulation, float(ratio)
    number = f"{passes} backward passes add" if passes > 1 else "One backward pass adds"
    why, fix = why_and_fix(verdict.context.step, short=passes < usual)
    assert found.first_event is not None
    return msgspec.structs.replace(
        found,
        factor=Factor(observed=factor, exact=str(ratio), tolerance=found.factor.tolerance),
        pattern=f"every contribution x {factor:.6g}, in a step of {plural(passes, 'pass')} instead of {usual}",
        units=sorted(set(verdict.units.values())),
        num_parameters=len(verdict.units),
        ranks=sorted({rank for held in verdict.held if held.cells for rank in held.ranks}),
        first_event=msgspec.structs.replace(found.first_event, observed_factor=factor),
        explanation=f"{number} up in this step, and the loss divides by {usual}, which is right in the steps with "
        f"{usual} passes: {why}.",
        fix=fix,
        suggested_experiment=None,
        consequence=consequence,
    )

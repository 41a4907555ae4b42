"""A module's backward does not give the derivative of its forward.

## What it does
`gradcheck run --verify` runs each module of one microbatch again and compares the gradient that autograd gives, along
a direction, with central differences of the module's output. It finds a factor in a backward, a backward that ignores
the gradient that arrives, a path that is cut off, a sum over tensor- or context-parallel ranks that is missing, and a
hook that scales. It names the innermost module in which the two part.

## Why it matters
Everything else that gradcheck measures begins with the gradient that arrives at a parameter. If that is not the
gradient of the loss, all weights can be right and the model still learns something else.

## Example
    class Fused(torch.autograd.Function):
        @staticmethod
        def backward(ctx, grad_output):
            return ctx.saved_tensors[0]        # right while grad_output is 1, wrong for a scaled loss

## Fix
Mend the backward of the module that is named, and hold it with `torch.autograd.gradcheck` in a unit test. A factor is
in the code between the end of the child that is named and the end of the module. A missing sum: the backward of a
column-parallel layer adds up its input's gradient over the group (Megatron-LM's `f`); with DTensor, state the input's
layout. Gradient reversal, straight-through estimators and stop-gradients differ from the derivative on purpose.

## References
- torch.autograd.gradcheck; Megatron-LM, arXiv 1909.08053, section 3 (the conjugate operators f and g).
- Straight-through estimator, arXiv 1308.3432; gradient reversal, arXiv 1409.7495.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.audit import Remark, StepFacts
from gradcheck_dist.diagnosis.case import Case
from gradcheck_dist.diagnosis.context import StepContext
from gradcheck_dist.diagnosis.finding import Factor, Severity
from gradcheck_dist.diagnosis.rules.verdict import Answer
from gradcheck_dist.diagnosis.verified import ALL_PARAMETERS, Wrong, parameters_of, was_verified, wrong_modules
from gradcheck_dist.events import GradientCheck

CODE = "GS801"
NAME = "wrong-backward"
REVERSED = 1e-3
_UNKNOWN_STAGE = -2


def triggered(context: StepContext) -> bool:
    return False


def judge(case: Case) -> Answer | None:
    return None


def could_audit(facts: StepFacts) -> bool:
    return was_verified(facts.data.events)


def audit(facts: StepFacts) -> Iterator[Remark]:
    seen = [hop.factor for hop in facts.on_the_way.all_hops]
    for wrong in wrong_modules(facts.data.events):
        check = wrong.first
        if _between_stages(check, seen):
            continue  # told by GS202, with both ends
        if _is_group_size(check) and not facts.weights_right:
            continue  # a loss divided by the ranks that all hold it makes such a sum right: one finding says so
        names = parameters_of(wrong, facts.data.tracks)
        reversed_ = check.factor is not None and abs(check.factor + 1) < REVERSED
        meant = _may_be_meant(check, reversed_)
        severity: Severity = "info" if check.shape == "flat" else "warning" if meant else "error"
        yield Remark(
            answer=Answer(explanation=_explain(wrong), fix=_fix(wrong, meant), severity=severity),
            pattern=_pattern(wrong),
            params=frozenset((_UNKNOWN_STAGE, name) for name in names),
            ranks=wrong.ranks,
            rank=wrong.checks[0][0],
            event=check,
            factor=_factor(check),
        )


def _may_be_meant(check: GradientCheck, reversed_: bool) -> str:
    if check.shape == "cut":
        return "a stop-gradient (detach, no_grad)"
    if check.shape == "flat":
        return "a straight-through estimator"
    if check.name == ALL_PARAMETERS:
        return "a hook that scales the gradient of the output"
    return "gradient reversal" if reversed_ else ""


def _between_stages(check: GradientCheck, seen: list[float]) -> bool:
    at_an_edge = check.target == "boundary" or (check.target == "leaf" and check.name == ALL_PARAMETERS)
    return at_an_edge and check.factor is not None and any(abs(check.factor / one - 1) < REVERSED for one in seen)


def _is_group_size(check: GradientCheck) -> bool:
    size = len(check.group)
    return size > 1 and check.factor is not None and abs(check.factor / size - 1) < REVERSED


def _factor(check: GradientCheck) -> Factor:
    if check.factor is None:
        return Factor(observed=None)
    tolerance = abs(check.error / check.numerical) if check.error is not None and check.numerical else None
    return Factor(observed=check.factor, tolerance=tolerance)


def _what(check: GradientCheck) -> str:
    """What the check was about, in words."""
    if check.target == "parameters":
        return f"the parameters of {check.name}"
    if check.target == "input":
        return f"input {check.name}"
    if check.name == ALL_PARAMETERS:
        return ALL_PARAMETERS
    if check.target == "boundary":
        return f"the output that goes to {check.name}"
    return f"parameter {check.name}"


def _pattern(wrong: Wrong) -> str:
    check = wrong.first
    where = f"{', '.join(wrong.modules[:3])}{' and others' if len(wrong.modules) > 3 else ''}"
    how = {
        "scaled": f"x {check.factor:.6g}" if check.factor is not None else "scaled",
        "cut": "no gradient where the output does depend on it",
        "constant": "the same gradient whatever gradient arrives",
        "flat": "a gradient where the output does not depend on it",
        "partial": "a summand over the ranks that nobody added up",
    }.get(check.shape, "another gradient than the derivative")
    return f"{where}: {_what(check)} gets {how}"


def _explain(wrong: Wrong) -> str:
    check = wrong.first
    ranks = f", checked together on ranks {', '.join(map(str, check.group))}" if len(check.group) > 1 else ""
    if check.target == "leaf":
        everywhere = check.name == ALL_PARAMETERS
        where = "on the model's output" if everywhere else "on the parameter, or on a tensor outside of any module"
        return (
            f"Training delivered {check.factor:.6g} times the gradient that forward and backward of {check.module} "
            f"give at {_what(check)} when they run once more. A hook {where}, scales it."
        )
    if check.target == "boundary":
        return (
            f"The gradient that arrived at the output of {check.module} is {check.factor:.6g} times the one that left "
            f"the input of the next stage on {check.name}: it was scaled on the way between them."
        )
    if check.shape == "partial":
        return (
            f"All of ranks {', '.join(map(str, check.group))} hold the same output of {check.module} "
            f"({check.module_type}) and get the same gradient there, but what leaves at {_what(check)} is each rank's "
            "own summand, and what comes before takes it for the whole."
        )
    numbers = (
        f"autograd gives {check.observed:.6g} along a direction where central differences give {check.numerical:.6g} "
        f"+- {check.error:.1g} ({check.precision}{ranks})"
        if check.observed is not None and check.numerical is not None and check.error is not None
        else "autograd and central differences part"
    )
    rest = (
        ""
        if check.target != "parameters"
        else f" {check.name} alone is right: it happens behind it, inside {check.module}."
    )
    other = sorted({_what(one) for _, one in wrong.checks} - {_what(check)})
    also = f" The same holds for {', '.join(other[:3])}, in its own measure." if other else ""
    times = (
        " The factor is the number of ranks: a sum in forward is summed again in backward."
        if _is_group_size(check)
        else ""
    )
    return f"In {check.module} ({check.module_type}), for {_what(check)}: {numbers}.{times}{rest}{also}"


def _fix(wrong: Wrong, meant: str) -> str:
    check = wrong.first
    if check.target == "boundary":
        return "Look at what sends and receives gradients between the stages, and at hooks on the stages' outputs."
    if check.target == "leaf":
        return "Look for register_hook on the parameter or on the module's output in the training code."
    if meant:
        return f"If this is {meant}, nothing is wrong. Otherwise mend the backward of {check.module}."
    if len(check.group) > 1:
        return (
            f"Look at the backward of the collectives in {check.module}: a replicated input's gradient is the sum over "
            "the group, and a sum in forward passes the gradient on as it is."
        )
    return f"Mend the backward of what {check.module} calls, and hold it with torch.autograd.gradcheck in a unit test."

"""A module's backward does not give the derivative of its forward.

## What it does
`gradcheck run --verify` runs each module of one microbatch again and compares the gradient that autograd gives, along
a direction, with central differences of the module's output. It finds a factor in a backward, a backward that ignores
the gradient that arrives, a path that is cut off, a sum over tensor- or context-parallel ranks that is missing, and a
hook that scales. It names the innermost module in which the two part. Losses that a function attaches to an activation
are checked as well, and what is computed outside of modules, from their outputs to the loss. A loss over several ranks
is one function of all of them: features that are gathered without a gradient learn from their own rank's loss alone.

A stop-gradient that is written (detach, .data, .item, no_grad) is told as a remark, with its line, where the gradient
is right with it; a warning where an optimizer's parameter gets nothing at all by it. So are a straight-through
estimator and a function that turns the gradient's sign. A backward that clips what arrives leaves its module open.

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
layout. Features for a loss over all ranks: torch.distributed.nn.functional.all_gather has a gradient,
torch.distributed.all_gather has none; where every rank computes the whole loss, putting the own back is enough.
Gradient reversal, straight-through estimators and stop-gradients differ from the derivative on purpose.

## References
- torch.autograd.gradcheck; Megatron-LM, arXiv 1909.08053, section 3 (the conjugate operators f and g).
- Features gathered without a gradient: mlfoundations/open_clip#616.
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
from gradcheck_dist.events import GradientCheck, OptimizerStep

CODE = "GS801"
NAME = "wrong-backward"
REVERSED = 1e-3
RECEIVED = "a collective"
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
        meant = _may_be_meant(check)
        severity = _severity(check, meant, _is_lost(facts, names))
        yield Remark(
            answer=Answer(explanation=_explain(wrong), fix=_fix(wrong, meant), severity=severity),
            pattern=_pattern(wrong),
            params=frozenset((_UNKNOWN_STAGE, name) for name in names),
            ranks=wrong.ranks,
            rank=wrong.checks[0][0],
            event=check,
            factor=_factor(check),
        )


def _may_be_meant(check: GradientCheck) -> str:
    if check.shape in ("cut", "stopped"):
        return "a stop-gradient (detach, no_grad)"
    if check.shape == "flat":
        return "a straight-through estimator"
    if check.shape == "apart" and check.reason:
        return "an approximation: a feature learns from its own rank's loss alone"
    if check.name == ALL_PARAMETERS:
        return "a hook that scales the gradient of the output"
    minus = check.factor is not None and abs(check.factor + 1) < REVERSED
    return "gradient reversal" if minus or check.shape == "reversed" else ""


def _severity(check: GradientCheck, meant: str, lost: bool) -> Severity:
    """What stands written in the source and is a known way to train is a remark, unless a parameter that an optimizer
    holds got nothing at all by it."""
    if check.shape in ("flat", "reversed"):
        return "info"
    if check.shape == "stopped" or (check.shape == "cut" and check.reason):
        return "warning" if (check.shape == "cut" and lost) or check.reason.startswith(RECEIVED) else "info"
    return "warning" if meant else "error"


def _is_lost(facts: StepFacts, names: list[str]) -> bool:
    """Whether an optimizer holds one of these parameters and no backward pass of the step reached it."""
    lost = {
        (rank, param)
        for rank, of_rank in facts.data.events.items()
        for event in of_rank
        if isinstance(event, OptimizerStep) and event.unreached is not None
        for param in facts.data.params_of(rank, event.unreached)
    }
    return any(
        (rank, track.param.id) in lost
        for key, of_key in facts.data.tracks.items()
        if key[1] in names
        for rank, track in of_key.items()
    )


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
    if check.target == "outside":
        return "the output" + (f" {check.name}" if check.name else "")
    if check.target == "boundary":
        return f"the output that goes to {check.name}"
    return f"parameter {check.name}"


def _pattern(wrong: Wrong) -> str:
    check = wrong.first
    where = f"{', '.join(wrong.modules[:3])}{' and others' if len(wrong.modules) > 3 else ''}"
    how = {
        "scaled": f"x {check.factor:.6g}" if check.factor is not None else "scaled",
        "cut": "no gradient where the output does depend on it"
        + (f", cut off by {check.reason}" if check.reason else ""),
        "constant": "the same gradient whatever gradient arrives",
        "flat": "a gradient where the output does not depend on it",
        "partial": "a summand over the ranks that nobody added up",
        "apart": "the gradient of its own rank's share alone",
        "stopped": f"a gradient that takes for constant what comes from {check.reason}",
        "reversed": "the gradient with the other sign on the way through a function",
    }.get(check.shape, "another gradient than the derivative")
    return f"{where}: {_what(check)} gets {how}"


def _explain(wrong: Wrong) -> str:
    check = wrong.first
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
    if check.shape == "apart":
        return (
            f"On ranks {', '.join(map(str, check.group))} what {check.module} ({check.module_type}) computes depends "
            f"on {_what(check)} of the other ranks too, and each rank's gradient is that of its own share alone: "
            f"what the others want of it is lost. In sum over these ranks {_numbers(check)}."
        )
    if check.shape == "partial":
        return (
            f"All of ranks {', '.join(map(str, check.group))} hold the same output of {check.module} "
            f"({check.module_type}) and get the same gradient there, but what leaves at {_what(check)} is each rank's "
            "own summand, and what comes before takes it for the whole."
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
    if check.shape == "stopped":
        times = f" With what comes from {check.reason} for a constant, they agree."
    elif check.shape == "cut" and check.reason:
        times = f" It is cut off by {check.reason}."
    elif check.reason:
        times = f" It is the gradient {check.reason}."
    if check.target == "outside":
        return f"Between {_what(check)} of {check.module} and the loss, outside of modules: {_numbers(check)}.{times}"
    return f"In {check.module} ({check.module_type}), for {_what(check)}: {_numbers(check)}.{times}{rest}{also}"


def _numbers(check: GradientCheck) -> str:
    ranks = f", checked together on ranks {', '.join(map(str, check.group))}" if len(check.group) > 1 else ""
    if check.observed is None or check.numerical is None or check.error is None:
        return "autograd and central differences part"
    return (
        f"autograd gives {check.observed:.6g} along a direction where central differences give {check.numerical:.6g} "
        f"+- {check.error:.1g} ({check.precision}{ranks})"
    )


def _fix(wrong: Wrong, meant: str) -> str:
    check = wrong.first
    if check.target == "boundary":
        return "Look at what sends and receives gradients between the stages, and at hooks on the stages' outputs."
    if check.target == "leaf":
        return "Look for register_hook on the parameter or on the module's output in the training code."
    if check.shape == "apart" or (check.shape == "stopped" and check.reason.startswith(RECEIVED)):
        return (
            "Communicate with a gradient: torch.distributed.nn.functional.all_gather, or a torch.autograd.Function "
            "whose backward adds up what all ranks want." + (f" If this is {meant}, nothing is wrong." if meant else "")
        )
    if meant:
        return f"If this is {meant}, nothing is wrong. Otherwise mend the backward of {check.module}."
    if len(check.group) > 1:
        return (
            f"Look at the backward of the collectives in {check.module}: a replicated input's gradient is the sum over "
            "the group, and a sum in forward passes the gradient on as it is."
        )
    return f"Mend the backward of what {check.module} calls, and hold it with torch.autograd.gradcheck in a unit test."

"""Weights are off in a way that no rule knows.

## What it does
Reports every pattern of wrong weights that none of the named rules recognises: its ratio matrix in words and numbers,
the event (or the gap between two recorded events) after which the weights could no longer come right, and every
product of degrees and counts that equals the factor.

## Why it matters
The three ledgers do not depend on a list of known bugs. A weight that is not what the objective asks for is a finding
whatever made it, and an unknown pattern is never renamed into a known one. What a line computes from gradients (a clip
by parameter, a projection) is no finding; the factor must be a number of the program, or the same in another step.

## Example
    for microbatch in batch:
        loss(model(microbatch)).backward()
    for p in model.parameters():
        p.grad.mul_(0.5)            # found: x 0.5, between backward and optimizer.step, by nothing that was recorded
    optimizer.step()

## Fix
Look at the source lines of the two events that enclose the change: whatever runs between them changes the gradient.
If the scaling is meant, declare the objective that it serves (`--objective`), or move it into the loss. A line in the
loop acts again on what earlier passes left: let it act once, behind the last.

## References
- How the ledgers are made: ARCHITECTURE.md, "The idea".
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.vocabulary import TOKENS
from gradcheck_dist.diagnosis.rules.gs301_mean_of_means import IS_SUM, SUM_MEANT, is_sum
from gradcheck_dist.diagnosis.rules.gs303_wrong_normalizer import SCALED
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.factors import name_number
from gradcheck_dist.diagnosis.weights.patterns import Pattern
from gradcheck_dist.diagnosis.words import in_short, that_write
from gradcheck_dist.events import DATA_PARALLEL, SHARDING, AmpUnscale, Backward, GradWrite, Reduce
from gradcheck_dist.ledger.reductions import nominal_factor

CODE = "GS000"
NAME = "unexplained-scale"
EXACT = 1e-4
LOOK_BETWEEN = "Look at what your code does to .grad between these two lines."
GIVE_A_COPY = (
    "Let what backward hands on be a copy, or give .grad memory of its own before the first pass: p.grad = "
    "torch.zeros_like(p), and zero_grad(set_to_none=False) from then on. torch.cuda.make_graphed_callables hands on "
    "the same buffers in each pass (pytorch#181723)."
)
ONCE_A_STEP = (
    "Let it act once in a step, behind the last pass, or multiply each pass's loss by this number in front of its "
    "backward pass."
)
DROP_IT = "Drop it, or let the loss carry its inverse; if it is meant, declare the objective that it serves."
DROP_IT_HERE = "Drop it for these parameters: the loss is that of others as well."


def triggered(context: StepContext) -> bool:
    return True


def shown(culprit: Culprit, pattern: Pattern) -> str:
    """What nobody recorded multiplied by; where the weights before it were not right, what it should have been too."""
    measured, off = culprit.factor, pattern.factor
    if not makes_up(culprit, pattern) or measured is None:
        return f"{off if measured is None else measured:.6g}"
    return f"{measured:.6g} where x {measured / off:.6g} would make the weights right"


def is_all(culprit: Culprit, pattern: Pattern) -> bool:
    """Whether what nobody recorded is all that is wrong with these weights."""
    if not culprit.factor or pattern.kind != "uniform" or not pattern.factor:
        return False
    return abs(culprit.factor / pattern.factor - 1) <= max(1e-3, pattern.tolerance)


def makes_up(culprit: Culprit, pattern: Pattern) -> bool:
    """Whether what nobody recorded had something to put right: weights were off before it, and still are behind it."""
    if not culprit.unrecorded or not culprit.factor or pattern.kind != "uniform" or not pattern.factor:
        return False
    return abs(culprit.factor / pattern.factor - 1) > max(1e-2, 4 * pattern.tolerance)


def left_as_it_was(case: Case) -> bool:
    """Whether a reduction by hand was recorded, and the gradient behind it is the own rank's alone."""
    event = case.culprit.event
    by_hand = isinstance(event, Reduce) and event.wrapper is None
    return by_hand and case.pattern.kind == "own-rank-only" and case.culprit.write is None


def counted_again(case: Case) -> int:
    """How many ranks of a reduction's group brought the same gradient, where weights are off by that number; else 1."""
    copies = case.context.ranks_per_batch(case.reduce.group) if case.reduce is not None and case.recorded else 1
    off = abs(case.pattern.factor / copies - 1)
    return copies if case.pattern.kind == "uniform" and off <= max(1e-3, 2 * case.pattern.tolerance) else 1


def added_again(case: Case) -> bool:
    """Whether what nobody recorded behind a pass leaves each pass as often as passes follow: a buffer adds up .grad,
    which itself adds up."""
    return case.pattern.kind == "power" and case.pattern.count == "(K-k)^1" and case.culprit.kind == "backward"


def onto_itself(culprit: Culprit) -> bool:
    """Whether a pass that handed on gradients in the memory of `.grad` doubled these, or lost what was there."""
    event, leaves = (culprit.before, 0.0) if culprit.unrecorded else (culprit.event, 2.0)
    if culprit.factor is None or culprit.absent or abs(culprit.factor - leaves) > 1e-2:
        return False
    return isinstance(event, Backward) and event.onto_itself is not None


def acts_in_each_pass(culprit: Culprit, pattern: Pattern) -> bool:
    """Whether a line multiplies in each pass what all passes before it have left in `.grad`."""
    factor = culprit.write.factor if culprit.write is not None else None
    if not factor or pattern.base is None:
        return False
    return abs(pattern.base / factor - 1) <= max(1e-3, pattern.tolerance)


def _number(case: Case, right: float) -> str:
    """What the program's own line should multiply by, and what it may have counted."""
    quantities, tolerance = case.context.quantities, max(EXACT, 2 * case.pattern.tolerance)
    named = name_number(right, quantities, tolerance, max_factors=2)
    name = f" = {named[0].expression}" if named and named[0].powers else ""
    fix = f"Let it multiply by {right:.6g}{name}, by which the weights come right"
    fix += ", or change the loss's constant." if case.everywhere else "."
    counted = 1 / case.culprit.write.factor if case.culprit.write is not None and case.culprit.write.factor else 0.0
    if TOKENS in name and counted > 2 and abs(counted - round(counted)) <= tolerance * counted:
        fix += f" Look what was counted as {round(counted)}: padding, or a batch that was skipped."
    return fix


def _lacking_divisor(case: Case) -> float | None:
    """What a reduction that averages divides other gradients by, where these are too large by just that number."""
    event = case.culprit.missing
    if not isinstance(event, Reduce) or case.pattern.kind != "uniform" or not 0 < (by := nominal_factor(event)) < 1:
        return None
    return 1 / by if abs(case.pattern.factor * by - 1) <= max(1e-3, 2 * case.pattern.tolerance) else None


def _up_to_backward(case: Case) -> str:
    """Where a loss may have got another number: between its line and that of its backward pass."""
    site = case.culprit.event.site if case.culprit.event is not None else None
    at = case.configured_at
    if site is None or at is None or at == f"{site.file}:{site.line}":
        return "on this line"
    return f"between this line and their backward pass ({at.rpartition('/')[2]})"


def judge(case: Case) -> Answer:
    culprit = case.culprit
    if onto_itself(culprit):
        where = (
            "What a backward pass hands on lies in the memory of .grad, where an earlier pass left its own: autograd "
            "adds it to itself (x 2), and what was there before is lost if it was written over."
        )
        fix = GIVE_A_COPY
    elif culprit.unrecorded:
        factor = f"x {shown(culprit, case.pattern)}" if culprit.factor is not None else "a change"
        end = f"the {culprit.before.__struct_config__.tag} event" if culprit.before is not None else "the optimizer"
        where = f"Between the {culprit.kind} event and {end} the gradient was changed ({factor}) by nothing recorded."
        where += f" In between, {that_write(culprit.lines, 'it')}." if culprit.lines else ""
        fix = LOOK_BETWEEN if not culprit.lines else f"Look at what {in_short(culprit.lines)} does to .grad."
        if added_again(case):
            where += " So it is where each pass adds .grad to a buffer, and .grad still holds what earlier passes left."
            fix = "Empty .grad of the model's own parameters each time that it was added to a buffer (p.grad = None)."
        if culprit.write is not None:
            where = f"This line writes to .grad ({factor}): no probe, no objective asks for it."
            fix = DROP_IT if case.everywhere else DROP_IT_HERE
            right = (culprit.write.factor or 0.0) / case.pattern.factor if makes_up(culprit, case.pattern) else 1.0
            if is_all(culprit, case.pattern):
                besides = "" if case.stands_alone else " and what else is found"
                where += f" Without it{besides} the weights would be right."
            elif case.pattern.objective == "rank-token-mean":
                fix = (
                    "Let it divide by the tokens of all ranks (dist.all_reduce their number first), not by each rank's "
                    "own, or declare --objective rank-token-mean."
                )
            elif acts_in_each_pass(culprit, case.pattern):
                where += " In each pass it acts again on what earlier passes left."
                fix = ONCE_A_STEP
            elif right and abs(right - 1) > max(1e-3, case.pattern.tolerance):
                fix = _number(case, right)
        if culprit.spared is not None:
            by = "by this line" if culprit.write is not None else "by nothing recorded"
            where = (
                f"Between the {culprit.kind} event and {end} other gradients of the same contributions are multiplied "
                f"by {culprit.spared:.6g}, {by}, and come out right; these are left as they were."
            )
            mine = "these parameters" if len(case.ranks) == case.context.world_size else "what these ranks hold"
            there = "on this line" if culprit.write is not None else "between these two lines"
            fix = f"Do to {mine} what your code does to the others {there}."
        elif left_as_it_was(case):
            where = (
                f"What the reduction brings is not in the gradient that {end} reads: the own rank's part is there as "
                "it went in. It was reduced in a copy, or asynchronously and was read too early."
            )
            fix = "Wait for an asynchronous reduction (work.wait()) before the gradient is read; write a copy back."
        elif culprit.kind == "loss" and culprit.gradient is not None:
            where += " It or the loss is to blame: which of the two has the wrong number, these weights do not tell."
            fix = f"{LOOK_BETWEEN[:-1]}, and at the numbers by which the loss is divided in front of them."
    elif isinstance(culprit.missing, GradWrite) and culprit.missing.site is not None:
        line = culprit.missing.site.short
        where = f"{line} multiplies other gradients by {culprit.missing.factor:.6g}, and not these."
        fix = f"Do to these parameters what {line} does to the others."
    elif culprit.absent:
        where = "Everything recorded was right up to here; something that should have followed did not happen."
        fix = "Look for the reduction or scaling that this parameter's gradient should still have gone through."
        if isinstance(culprit.missing, AmpUnscale):
            fix = SCALED
        if culprit.missing is not None:
            site = culprit.missing.site
            line = f" at {site.short}" if site is not None else ""
            kind = culprit.missing.__struct_config__.tag
            where += f" Other gradients went through the {kind} event{line}; these did not."
        if (divisor := _lacking_divisor(case)) is not None:
            fix = (
                f"Divide these gradients by {divisor:g}, too, behind the last backward pass: that reduction divides "
                "the others by it, and the loss that they share is made for that."
            )
    else:
        measured = f"{culprit.factor:.6g}" if culprit.factor is not None else "an unknown factor"
        documented = f" (documented: {culprit.nominal:.6g})" if culprit.nominal is not None else ""
        where = f"The {culprit.kind} event multiplied the weights by {measured}{documented}."
        fix = "Compare the factor with what this line is meant to do."
        if culprit.kind == "loss":
            where = "These losses weigh so where they enter backward."
            fix = f"Look at what multiplies or divides them {_up_to_backward(case)}."
        if isinstance(culprit.event, Reduce) and culprit.event.impl == "ddp" and culprit.event.hook is not None:
            fix = f"Compare the factor with what the communication hook {culprit.event.hook} is meant to do."
        elif isinstance(culprit.event, Reduce) and culprit.event.impl in SHARDING | DATA_PARALLEL:
            fix = (
                "Look for what multiplies this gradient as it is reduced: a hook (register_post_accumulate_grad_hook, "
                "which runs behind FSDP2's reduction; set_all_reduce_hook)."
            )
        if (copies := counted_again(case)) > 1:
            where += f" Its group holds {copies} ranks of each batch, which bring the same gradient."
            fix = "Reduce over ranks that have batches of their own, or divide by the number of ranks that share one."
        if case.rescaled:
            where += " A loss scale that changes between passes does this: unscaling takes one number away from all."
            fix += " If scaler.update() runs between passes, call it once a step, after scaler.step()."
        if culprit.kind == "backward":
            fix = (
                "Look for what multiplies this gradient during the backward pass: a hook (register_hook, "
                "register_post_accumulate_grad_hook), or an autograd function of your own."
            )
    summed = is_sum(case)
    return Answer(
        explanation=f"The weights are off: {case.pattern.text}. {where}{IS_SUM if summed else ''}",
        fix=f"{fix}{SUM_MEANT if summed else ''}",
        suggested_experiment="Run again with another number of accumulation steps or ranks: a factor made of that "
        "number changes with it.",
    )

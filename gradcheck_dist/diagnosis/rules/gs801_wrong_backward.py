"""A module's backward does not give the derivative of its forward.

## What it does
`gradcheck run --verify` runs each module of one microbatch again and compares the gradient that autograd gives, along
a direction, with central differences of the module's output. It finds a factor in a backward, a backward that ignores
the gradient that arrives, a path that is cut off, a sum over tensor- or context-parallel ranks that is missing, and a
hook that scales. It names the innermost module in which the two part. Losses that a function attaches to an activation
are checked as well, and what is computed outside of modules, from their outputs to the loss. A loss over several ranks
is one function of all of them: features that are gathered without a gradient learn from their own rank's loss alone.

Every call of a module is checked (of many the first ones and the last), also in checkpoints; a checkpoint that runs
again from other random numbers is named. A torch.autograd.Function that makes the difference is named with its lines.
The report lists what was not checked.

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
Gradient reversal, straight-through estimators, scaled gradients and stop-gradients differ from the derivative on
purpose: `gradcheck run --verify --meant NAME`, with the name of the function or module, says so.

## References
- torch.autograd.gradcheck; Megatron-LM, arXiv 1909.08053, section 3 (the conjugate operators f and g).
- Features gathered without a gradient: mlfoundations/open_clip#616.
- Straight-through estimator, arXiv 1308.3432; gradient reversal, arXiv 1409.7495.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.backward_words import RECEIVED, explain, fix, is_group_size, pattern
from gradcheck_dist.diagnosis.audits.equal_summands import equal_summands
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.audits.verified import (
    ALL_PARAMETERS,
    not_summed,
    parameters_of,
    unsummed,
    was_verified,
    wrong_modules,
)
from gradcheck_dist.diagnosis.finding import Factor, Severity
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import GradientCheck, LossGradient, OptimizerStep, Recompute
from gradcheck_dist.ledger.loss_backwards import OwnBackward

CODE = "GS801"
NAME = "wrong-backward"
REVERSED = 1e-3
HOOK_NEAR = 1e-2
"""Relative difference up to which what a hook did is the factor that central differences tell."""
MEANT = "Nothing to do where that hook is meant."
_UNKNOWN_STAGE = -2


def could_audit(facts: StepFacts) -> bool:
    return was_verified(facts.data.events)


def audit(facts: StepFacts) -> Iterator[Remark]:
    seen = [hop.factor for hop in facts.on_the_way.all_hops]
    summands = [reason.removeprefix("verify: ") for reason in not_summed(facts.data)]
    told = {name.split(" ")[0] for one in equal_summands(facts.data, facts.held) for _, name in one.params}
    all_told = all(names <= told for names in unsummed(facts.data).values())
    for wrong in wrong_modules(facts.data.events):
        check = wrong.first
        if check.shape == "redrawn" and _is_recomputed(facts):
            continue  # told by GS704, with the line of the checkpoint
        if _between_stages(check, seen):
            continue  # told by GS202, with both ends
        if check.target == "outside" and not check.function and _by_a_loss(check, facts.own_backwards):
            continue  # told by GS803, with the function
        if is_group_size(check) and not facts.weights_right:
            continue  # a loss divided by the ranks that all hold it makes such a sum right: one finding says so
        if summands and all_told and check.target == "parameters":
            continue  # told by GS703, with the sum that they go into
        names = parameters_of(wrong, facts.data.tracks)
        meant = _may_be_meant(check)
        weighed = _is_weighed(check, names, wrong.ranks, facts)
        severity = "info" if weighed else _severity(check, meant, _is_lost(facts, names))
        # Whole gradients and summands of one block are right apart, and neither way together.
        more = f" Inside, {'; '.join(summands)}." if summands and check.target == "parameters" else ""
        more += " The weights hold that factor, and are right with it." if weighed else ""
        yield Remark(
            answer=Answer(
                explanation=explain(wrong) + more, fix=MEANT if weighed else fix(wrong, meant), severity=severity
            ),
            pattern=pattern(wrong),
            params=frozenset((_UNKNOWN_STAGE, name) for name in names),
            ranks=wrong.ranks,
            rank=wrong.checks[0][0],
            event=check,
            factor=_factor(check),
        )


def _is_weighed(check: GradientCheck, names: Sequence[str], ranks: Sequence[int], facts: StepFacts) -> bool:
    """Whether the weights of these parameters are right, and hold what multiplies their gradients behind backward, or
    at the whole model's output: a hook that takes back what an average divides."""
    if check.target != "leaf" or check.shape != "scaled" or check.factor is None:
        return False
    behind = check.factor
    if check.name == ALL_PARAMETERS:
        at_losses = {
            event.hooks_factor or 1.0
            for rank in ranks
            for event in facts.data.events.get(rank, ())
            if isinstance(event, LossGradient)
        }
        if len(at_losses) > 1:
            return False
        behind /= next(iter(at_losses), 1.0)
    concerned = [held for held in facts.held if held.param[1] in names and not set(ranks).isdisjoint(held.ranks)]
    return bool(concerned) and all(_comes_out_right(held, behind) for held in concerned)


def _comes_out_right(held: Held, factor: float) -> bool:
    if held.observed is None or held.nominal is None or not held.cells:
        return False
    return all(
        cell.right
        and not cell.summands
        and abs(held.observed[cell.column] - factor * held.nominal[cell.column])
        <= HOOK_NEAR * abs(held.observed[cell.column])
        for cell in held.cells
    )


def _by_a_loss(check: GradientCheck, own_backwards: Iterable[OwnBackward]) -> bool:
    """Whether a loss function's own backward gives what is wrong between the modules and the loss."""
    return any(
        not one.is_multiple or (check.factor is not None and one.multiplies_by(check.factor)) for one in own_backwards
    )


def _may_be_meant(check: GradientCheck) -> str:
    if check.shape in ("cut", "stopped"):
        return "a stop-gradient (detach, no_grad)"
    if check.shape == "flat":
        return "a straight-through estimator"
    if check.shape == "apart" and check.reason:
        return "an approximation: a feature learns from its own rank's loss alone"
    if check.hands_on and check.shape == "scaled":
        return "a gradient that is scaled on purpose"
    if check.name == ALL_PARAMETERS:
        return "a hook that scales the gradient of the output"
    minus = not check.function and check.factor is not None and abs(check.factor + 1) < REVERSED
    return "gradient reversal" if minus or check.shape == "reversed" else ""


def _severity(check: GradientCheck, meant: str, lost: bool) -> Severity:
    """What stands written in the source and is a known way to train is a remark, unless a parameter that an optimizer
    holds got nothing at all by it."""
    if check.shape in ("flat", "reversed") or check.meant:
        return "info"
    if check.shape == "stopped" or (check.shape == "cut" and check.reason):
        return "warning" if (check.shape == "cut" and lost) or check.reason.startswith(RECEIVED) else "info"
    return "warning" if meant else "error"


def _is_recomputed(facts: StepFacts) -> bool:
    return any(isinstance(event, Recompute) for of_rank in facts.data.events.values() for event in of_rank)


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


def _factor(check: GradientCheck) -> Factor:
    if check.factor is None:
        return Factor(observed=None)
    tolerance = abs(check.error / check.numerical) if check.error is not None and check.numerical else None
    return Factor(observed=check.factor, tolerance=tolerance)

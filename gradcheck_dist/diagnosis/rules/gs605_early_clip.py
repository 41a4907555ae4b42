"""Gradients are clipped before they are complete: more is added, or they are reduced or divided, after the clip.

## What it does
Finds clips that act on gradients to which a later backward of the same step adds, or which are combined over ranks
only afterwards: each microbatch, or each rank, gets a coefficient of its own. And clips that act before a line of the
trainer's own divides the same gradients, or some of them, by tokens, passes or ranks, which makes their weights right.
A max_norm that is a written number times that divisor is taken to be meant. A reduction to which all ranks bring the
same (an average once more, to be sure) completes nothing.

## Why it matters
The step's gradient is no mean over tokens any more: what has a large gradient weighs less, and how much less depends
on how the batch was cut. Copies on several ranks are still equal, and nothing else shows it. A sum over N tokens that
is clipped and then divided is clipped in nearly every step, to a norm N times below the one that was asked for.

## Example
    for batch in microbatches:
        loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)       # in the loop: once a microbatch
    optimizer.step()

## Fix
    for batch in microbatches:
        loss(batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)           # once, after the last backward and reduction
    optimizer.step()
accelerate: `if accelerator.sync_gradients: accelerator.clip_grad_norm_(...)`. With `no_sync` the last backward reduces,
so clip after it; with an all-reduce by hand, after that.

## References
- torch.nn.utils.clip_grad_norm_; accelerate guide "Gradient accumulation"; DDP `no_sync`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from typing import Any

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.early_clips import completed_by, scaled_apart, scaled_later
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.early_clips import early_product, first_clip, fits
from gradcheck_dist.diagnosis.finding import Factor
from gradcheck_dist.diagnosis.norms.clips import ACTS, is_round
from gradcheck_dist.diagnosis.norms.effect import effect_of_clip
from gradcheck_dist.diagnosis.norms.step_norms import ClipCall
from gradcheck_dist.diagnosis.weights.factors import name_number
from gradcheck_dist.events import Clip, Reduce
from gradcheck_dist.wording import plural

CODE = "GS605"
NAME = "early-clip"
SAME = 1e-3
BEHIND = "Clip once a step, after the last line that divides the gradients."
FIX = "Clip once a step, after the last backward and the last reduction."


def judge(case: Case) -> Answer | None:
    """Weights that are the product of the early clips that acted on each contribution, and of nothing else."""
    products = [early_product(held.replay, cell.column) for held, cell in case.cells]
    if not any(product < 1 - ACTS for product in products):
        return None
    given = case.context.relative and isinstance(case.culprit.event, Clip)
    if not (given or all(fits(held, cell) for held, cell in case.cells)):
        return None
    held, cell = min(case.cells, key=lambda one: early_product(one[0].replay, one[1].column))
    first = first_clip(held, cell)
    rank = held.replay.basis.origin[cell.column]
    return Answer(
        culprit=Culprit("clip", rank, first, nominal=first.coefficient, factor=first.coefficient),
        explanation=f"Gradients were clipped before they were complete: parts of one step's gradient weigh x "
        f"{min(products):.4g} to x {max(products):.4g} of what they should, the products of the clips' coefficients.",
        fix=FIX,
    )


def could_audit(facts: StepFacts) -> bool:
    return any(call.event.coefficient < 1 - ACTS for call in facts.norms.clips)


def audit(facts: StepFacts) -> Iterator[Remark]:
    early = [
        (call, later)
        for call in facts.norms.clips
        if call.event.coefficient < 1 - ACTS and (later := completed_by(facts, call)) is not None
    ]
    if CODE in facts.found:
        return
    if not early:
        yield from _divided_later(facts)
        return
    call, later = min(early, key=lambda one: (one[0].rank, one[0].event.seq))
    used = sorted(one.event.coefficient for one, _ in early)
    what = "combined over ranks" if isinstance(later, Reduce) else "added to by another backward"
    where = f" ({later.site.short})" if later.site else ""
    yield Remark(
        answer=Answer(
            explanation=f"Gradients were clipped and only then {what}{where}: parts of one step's gradient were "
            f"multiplied by {used[0]:.6g}" + (f" to {used[-1]:.6g}" if used[-1] > used[0] * (1 + ACTS) else "") + ".",
            fix=FIX,
        ),
        pattern=f"{plural(len(early), 'clip')} of unfinished gradients, coefficients {used[0]:.4g} to {used[-1]:.4g}",
        **_concerned([one for one, _ in early]),
        rank=call.rank,
        event=call.event,
        factor=Factor(observed=used[len(used) // 2]),
    )


def _concerned(calls: Sequence[ClipCall]) -> dict[str, Any]:
    """Fields of a Remark: the parameters and ranks of some clips."""
    return {
        "params": frozenset(part.key for call in calls for part in call.parts),
        "ranks": tuple(sorted({call.rank for call in calls})),
    }


def _is_meant(max_norm: float, factor: float) -> bool:
    """Whether somebody wrote a clip's norm times what is taken out later: then the product with it is a written number,
    and a simpler one than what was passed."""
    left = max_norm * factor
    return is_round(left) and (not is_round(max_norm) or _plainness(left) < _plainness(max_norm))


def _plainness(number: float) -> tuple[int, float]:
    """Fewer digits come first, then what is nearer to 1."""
    digits = 1 if abs(number / float(f"{number:.0e}") - 1) <= SAME else 2
    return digits, abs(log(number))


def _divided_later(facts: StepFacts) -> Iterator[Remark]:
    """Clips behind which the trainer's own lines multiply by what makes the weights right."""
    if not facts.weights_right:
        return
    acting = [call for call in facts.norms.clips if call.event.coefficient < 1 - ACTS]
    scaled = [(call, factor) for call in acting if (factor := scaled_later(facts, call)) is not None]
    wrong = [(call, factor) for call, factor in scaled if not _is_meant(call.event.max_norm, factor)]
    if not wrong:
        yield from _divided_in_part(facts, acting)
        return
    call, factor = min(wrong, key=lambda one: (one[0].rank, one[0].event.seq))
    event = call.event
    norm = event.total_norm * factor
    right = min(1.0, event.max_norm / norm)
    names = name_number(factor, facts.context.quantities, SAME)
    named = f" = {names[0].expression}" if names else ""
    yield Remark(
        answer=Answer(
            explanation=f"Gradients were clipped to norm {event.max_norm:g} (norm {event.total_norm:.6g}) and only "
            f"then multiplied by {factor:.6g}{named}, as is right for their weights: the optimizer gets the norm "
            f"{event.max_norm * factor:.6g}. Behind that line their norm is {norm:.6g}, "
            + (f"to be clipped to {event.max_norm:g}." if right < 1 else "and nothing was to be clipped."),
            fix=BEHIND,
        ),
        pattern=f"all gradients x {event.coefficient / right:.4g}: clipped by the norm that they had before a line of "
        "the trainer's own scaled them",
        **_concerned([one for one, _ in wrong]),
        rank=call.rank,
        event=event,
        factor=Factor(observed=event.coefficient / right),
        effect=effect_of_clip(
            facts.data, facts.norms, {one.rank: one.event.coefficient for one, _ in wrong}, right, 1 / factor
        ),
    )


def _divided_in_part(facts: StepFacts, acting: list[ClipCall]) -> Iterator[Remark]:
    """Clips by the norm of gradients of which the trainer's own lines had multiplied some already, and others not."""
    apart = [(call, factors) for call in acting if (factors := scaled_apart(facts, call))]
    if not apart:
        return
    call, factors = min(apart, key=lambda one: (one[0].rank, one[0].event.seq))
    last = [factor for factor in factors.values() if abs(factor - 1) > SAME]
    yield Remark(
        answer=Answer(
            explanation=f"Gradients were clipped to norm {call.event.max_norm:g} (norm {call.event.total_norm:.6g}), "
            f"and {len(last)} of {len(factors)} were multiplied by {min(last):.6g}"
            + (f" to {max(last):.6g}" if max(last) > (1 + SAME) * min(last) else "")
            + " after that, as is right for their weights: the norm was taken of gradients of unlike scale.",
            fix=BEHIND,
        ),
        pattern=f"clipped by a norm of gradients of which {len(last)} of {len(factors)} were still to be scaled",
        **_concerned([one for one, _ in apart]),
        rank=call.rank,
        event=call.event,
    )

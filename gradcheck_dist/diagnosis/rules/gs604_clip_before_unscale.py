"""Gradients are clipped while they carry a loss scale, and unscaled afterwards.

## What it does
Finds clips that come before the GradScaler's unscaling of the same parameters and act: they scale gradients that are S
times too large down to max_norm, and unscaling leaves max_norm / S for the optimizer. A line of the trainer's own that
divides by a power of two from 32 on behind the clip, and whose division makes the weights right, unscales as well. A
max_norm that is a written number times S is taken to be meant.

## Why it matters
Nearly every step is clipped, to a norm S times below the one that was asked for: the update depends on max_norm and S
instead of the gradient. With Adam, epsilon begins to dominate; without, training stands still.

## Example
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)                    # unscales here, after the clip

## Fix
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
accelerate: `accelerator.clip_grad_norm_` unscales by itself. FSDP: `ShardedGradScaler`, the same order.

## References
- pytorch/examples#1196; torch.amp examples, "Gradient clipping".
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.early_clips import scale_of
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Candidate, Factor
from gradcheck_dist.diagnosis.norms.clips import ACTS, is_round
from gradcheck_dist.diagnosis.norms.effect import effect_of_clip
from gradcheck_dist.diagnosis.norms.step_norms import ClipCall
from gradcheck_dist.events import AmpUnscale, GradWrite

CODE = "GS604"
NAME = "clip-before-unscale"


def could_audit(facts: StepFacts) -> bool:
    return bool(facts.norms.clips) and any(
        isinstance(event, AmpUnscale) or scale_of(event) is not None
        for events in facts.data.events.values()
        for event in events
    )


def audit(facts: StepFacts) -> Iterator[Remark]:
    scaled = [(call, scale) for call in facts.norms.clips if (scale := _unscaled_later(facts, call)) is not None]
    wrong = [
        (call, scale)
        for call, scale in scaled
        if call.event.coefficient < 1 - ACTS and not is_round(call.event.max_norm / scale)
    ]
    if not wrong:
        return
    call, scale = min(wrong, key=lambda one: (one[0].rank, one[0].event.seq))
    by_hand = not any(isinstance(event, AmpUnscale) for event in facts.data.events[call.rank])
    event = call.event
    norm = event.total_norm / scale
    right = min(1.0, event.max_norm / norm)
    expression = "1/loss_scale" if right < 1 else None
    yield Remark(
        answer=Answer(
            explanation=f"Gradients were clipped to norm {event.max_norm:g} while they carried loss scale {scale:g} "
            f"(norm {event.total_norm:.6g}), and unscaled afterwards: the optimizer gets the norm "
            f"{event.max_norm / scale:.6g}. Unscaled their norm is {norm:.6g}, "
            + (f"to be clipped to {event.max_norm:g}." if right < 1 else "and nothing was to be clipped."),
            fix="Call scaler.unscale_(optimizer) before clipping."
            if not by_hand
            else "Divide the gradients by the loss scale before clipping.",
        ),
        pattern=f"all gradients x {event.coefficient / right:.4g}: clipped by the norm of scaled gradients",
        params=frozenset(part.key for one, _ in wrong for part in one.parts),
        ranks=tuple(sorted({one.rank for one, _ in wrong})),
        rank=call.rank,
        event=event,
        factor=Factor(
            observed=event.coefficient / right,
            expression=expression,
            candidates=[Candidate(expression=expression, value=1 / scale)] if expression else [],
        ),
        effect=effect_of_clip(
            facts.data, facts.norms, {one.rank: one.event.coefficient for one, _ in wrong}, right, scale
        ),
    )


def _unscaled_later(facts: StepFacts, call: ClipCall) -> float | None:
    """The scale that is taken out of the clipped gradients after the clip; None where there is none, or where it had
    been taken out before."""
    clipped = set(facts.data.params_of(call.rank, call.event.params))
    for event in facts.data.events[call.rank]:
        if not isinstance(event, AmpUnscale) or event.scale in (0.0, 1.0):
            continue
        if clipped & set(facts.data.params_of(call.rank, event.params)):
            return event.scale if event.seq > call.event.seq else None
    if not facts.weights_right:
        return None  # what the loss never carried is no scale
    for event in facts.data.events[call.rank]:
        scale = scale_of(event)
        if scale is None or event.seq < call.event.seq:
            continue
        if isinstance(event, GradWrite) and clipped & set(facts.data.params_of(call.rank, event.params or 0)):
            return scale
    return None

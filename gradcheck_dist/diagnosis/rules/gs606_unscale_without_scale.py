"""Gradients are divided by a loss scale that the loss was never multiplied by.

## What it does
Finds one factor that is a power of two and at most 1/32, the same on every parameter, rank and contribution, that came
between the last reduction (or backward) and the optimizer or the clip, by nothing recorded, while no loss carries a
scale: a loss scale taken out of gradients that never had it. So does an unscaling that follows another one.

## Why it matters
All gradients are S times too small. Adam hides it until gradients come near its epsilon; clipping never acts, SGD
stands still. Losses look the same for a long time.

## Example
    scale = 65536.0 if config.mixed_precision else 1.0      # true for bfloat16, too
    loss.backward()                                         # and not (loss * scale).backward()
    for p in model.parameters():
        p.grad.div_(scale)

## Fix
    use_scaler = dtype is torch.float16                     # bfloat16 has float32's range and needs no scale
    scaler = torch.amp.GradScaler(enabled=use_scaler)
    scaler.scale(loss).backward()
A scaler remembers whom it has unscaled by the object: give `unscale_` and `step` the same one, not a wrapper and the
optimizer in it.

DeepSpeed: `"fp16": {"enabled": false}` where `"bf16": {"enabled": true}`; with ZeRO stage 0 see the issue below.

## References
- deepspeedai/DeepSpeed#7839; unscaled twice: huggingface/accelerate#115.
- torch.amp.GradScaler: scale and unscale_ belong together.
"""

from __future__ import annotations

from math import log2

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.written import LEAST_POWER
from gradcheck_dist.events import AmpUnscale, Clip, GradientNorm, OptimizerStep

CODE = "GS606"
NAME = "unscale-without-scale"


def judge(case: Case) -> Answer | None:
    if (again := _unscaled_again(case)) is not None:
        return again
    power = loss_scale_power(case)
    if power is None:
        return None
    before = case.culprit.before
    assert before is not None
    return Answer(
        explanation=f"Between the {case.culprit.kind} event and the {before.__struct_config__.tag} event every "
        f"gradient was multiplied by {case.pattern.factor:.6g} = 1/{2**power}, alike on all parameters and ranks. Loss "
        "scales are powers of two; no loss of this step carried one.",
        fix="Unscale only what was scaled: take the division out, or use GradScaler for both. bfloat16 needs neither.",
    )


def _unscaled_again(case: Case) -> Answer | None:
    """What is to be said where an unscaling found the scale gone already."""
    event = case.event
    if not isinstance(event, AmpUnscale) or case.culprit.unrecorded or case.pattern.kind != "uniform":
        return None
    if not case.everywhere or abs(case.pattern.factor * event.scale - 1) > max(1e-5, 2 * case.pattern.tolerance):
        return None
    return Answer(
        explanation=f"Gradients were unscaled twice: the loss carried the scale {event.scale:g} once, and the second "
        f"unscaling leaves 1/{event.scale:g} of every gradient.",
        fix="Give scaler.unscale_ and scaler.step the same optimizer object: a scaler takes a wrapper and the "
        "optimizer in it for two.",
    )


def loss_scale_power(case: Case) -> int | None:
    """n, where the case is that of everything multiplied by 2^-n just before the clip or its norm, or the optimizer."""
    culprit, pattern = case.culprit, case.pattern
    ends = isinstance(culprit.before, OptimizerStep | Clip | GradientNorm)
    if not culprit.unrecorded or not ends or pattern.kind != "uniform":
        return None
    if not case.everywhere or not 0 < pattern.factor <= 2.0**-LEAST_POWER:
        return None
    power = round(-log2(pattern.factor))
    close = abs(pattern.factor * 2.0**power - 1) <= max(1e-5, min(2 * pattern.tolerance, 1e-3))
    return power if close else None

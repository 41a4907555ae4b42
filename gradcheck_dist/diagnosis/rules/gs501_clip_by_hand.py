"""Everything was scaled down alike, behind the last reduction and before the optimizer: what a hand-written clip does.

## What it does
Finds one factor below 1 that no recorded event accounts for, the same on every parameter, rank and contribution, that
came between the last reduction (or backward) and the optimizer. Clipping by norm leaves just this. Where the norm that
it left is one that people write (1.0, 0.5), it is a clip, and nothing is found. Else a clip and a mistake cannot be
told apart by one step: this is a warning, not an accusation. In several steps a clip leaves one norm and a constant is
one factor, or one formula of counts: the first is then clean and the second an error (GS000). So is a number of few
digits that a line of the trainer's multiplies by in place. Powers of two are loss scales (GS606).

## Why it matters
A clip scales all weights of a step alike and is meant. A forgotten constant looks the same in one step and is not: it
moves weight decay's and epsilon's share and the step length of every optimizer without scale invariance.

## Example
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, max_norm / norm))

## Fix
Look at the factor in several steps. A clip's factor changes with the gradient's norm and is 1 in quiet steps; a
constant stays. `torch.nn.utils.clip_grad_norm_` is recorded, and its coefficient is taken out of the weights.

## References
- torch/nn/utils/clip_grad.py, clip_grad_norm_; gradient scaling by hand in nanoGPT-style loops.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.constants import is_constant
from gradcheck_dist.diagnosis.rules.gs000_unexplained_scale import shown
from gradcheck_dist.diagnosis.rules.gs606_unscale_without_scale import loss_scale_power

CODE = "GS501"
NAME = "clip-by-hand"


def judge(case: Case) -> Answer | None:
    culprit, pattern = case.culprit, case.pattern
    if not case.could_be_clip or loss_scale_power(case) is not None:
        return None
    if is_constant(case):
        return None
    return Answer(
        severity="warning",
        explanation=f"Between the {culprit.kind} event and the {culprit.before.__struct_config__.tag} event every "  # type: ignore[union-attr]
        f"gradient was multiplied by {shown(culprit, pattern)}, alike on all parameters and ranks, by nothing "
        "recorded. A hand-written clip does just this; so does a forgotten constant. The norm that it left is not one "
        "that tells.",
        fix="If it is a clip, nothing is wrong. Otherwise look at what runs between these two lines.",
        suggested_experiment="Judge more steps: a clip's factor changes from step to step, a constant's does not.",
    )

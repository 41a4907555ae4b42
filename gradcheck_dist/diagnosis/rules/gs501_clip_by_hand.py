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
from gradcheck_dist.diagnosis.causes.vocabulary import RANKS
from gradcheck_dist.diagnosis.rules.gs000_unexplained_scale import shown
from gradcheck_dist.diagnosis.rules.gs606_unscale_without_scale import loss_scale_power
from gradcheck_dist.diagnosis.weights.factors import Name, chance

CODE = "GS501"
NAME = "clip-by-hand"
SIMPLE = 3.5
SURE = 0.005
"""Clips are far more frequent than forgotten constants: chance must make a name more seldom than elsewhere."""
SURE_OF_RANKS = 0.1


def _surely(name: Name, case: Case) -> bool:
    """Whether a name tells a constant from a norm: chance makes some names often. Where ranks were combined in the
    bracket, a number of ranks is no chance."""
    miss = max(abs(name.value / case.pattern.factor - 1), case.pattern.tolerance)
    expected = case.combined_unseen and len(name.powers) == 1 and name.powers[0][0] in RANKS
    return chance(name, case.context.quantities, miss) < (SURE_OF_RANKS if expected else SURE)


def judge(case: Case) -> Answer | None:
    culprit, pattern = case.culprit, case.pattern
    if not case.could_be_clip or loss_scale_power(case) is not None:
        return None
    if any(name.cost < SIMPLE and _surely(name, case) for name in case.names):
        return None  # a constant of degrees and counts is somebody's formula, not a norm
    return Answer(
        severity="warning",
        explanation=f"Between the {culprit.kind} event and the {culprit.before.__struct_config__.tag} event every "  # type: ignore[union-attr]
        f"gradient was multiplied by {shown(culprit, pattern)}, alike on all parameters and ranks, by nothing "
        "recorded. A hand-written clip does just this; so does a forgotten constant. The norm that it left is not one "
        "that tells.",
        fix="If it is a clip, nothing is wrong. Otherwise look at what runs between these two lines.",
        suggested_experiment="Judge more steps: a clip's factor changes from step to step, a constant's does not.",
    )

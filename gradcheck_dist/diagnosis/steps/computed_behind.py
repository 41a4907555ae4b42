"""Losses that are the same in every step, and what is made of them behind that is another number in each.

A clip by a norm of its own (experts' squares count a fraction, some parameters are left out) that acts in every step
leaves no round norm. One step does not tell it from losses that are too small; several do: no constant and no count
of tokens is another number in each of them without a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gradcheck_dist.diagnosis.steps.other_steps import ALIKE, LEAST_STEPS, Conduct
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

NOT_THEIRS = "a clip by a norm that is not theirs"
WHOLE = 1e-3
"""How near all numbers of several steps come to whole ones that are counts."""


def leave_computed_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no losses of what is made of them behind, where that is too small by a number that no step names."""
    conducts = [verdict.conduct for verdict in verdicts if verdict.conduct is not None]
    if len(conducts) < max(LEAST_STEPS, len(verdicts)) or not _of_computed(conducts):
        return
    errors = [verdict.errors for verdict in verdicts]
    if any(len(found) != 1 or found[0].first_event is None or found[0].factor.expression for found in errors):
        return
    for verdict, conduct, (error,) in zip(verdicts, conducts, errors, strict=True):
        if error.first_event is None or error.first_event.kind != "loss":
            continue
        verdict.findings.remove(error)
        verdict.effects.clear()
        verdict.reasons.append(
            f"gradients are x {conduct.losses * conduct.rest:.6g} of what they should be, and in every other step x "
            f"another number that no count makes, while the losses are the same: {NOT_THEIRS} "
            "(one that leaves some out, or counts some again) does this where it acts in every step"
        )


def _of_computed(conducts: Sequence[Conduct]) -> bool:
    """Whether the losses do the same in every step, by token or in their sum, and all that follows another in each:
    less than it should, and by no whole number of tokens."""
    if not _one_number([one.losses for one in conducts]) and not _one_number([one.token for one in conducts]):
        return False
    ratios = [one.losses * one.rest for one in conducts]
    tokens = [one.token * one.rest for one in conducts]
    if (
        max(ratios) >= 1 - ALIKE
        or _any_alike(ratios)
        or _any_alike(tokens)
        or _any_alike([one.rest for one in conducts])
    ):
        return False
    return not all(abs(1 / token - round(1 / token)) <= WHOLE for token in tokens)


def _one_number(values: Sequence[float]) -> bool:
    return max(values) <= min(values) * (1 + ALIKE)


def _any_alike(values: Sequence[float]) -> bool:
    return any(abs(other - one) <= ALIKE * other for one, other in pairwise(sorted(values)))

"""Losses whose weight is another one from step to step: a coefficient that follows a schedule.

A loss is warmed up, or counts less in the first step. No wrong count does that: with as many passes, ranks and tokens
in each step it would be the same number. Where the line that multiplies the losses is seen, and all steps are right but
for its number, the first steps alone may weigh less than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from math import prod
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.steps.other_steps import LEAST_STEPS, Conduct, alike
from gradcheck_dist.diagnosis.weights.written import is_exactly_written
from gradcheck_dist.diagnosis.words import OF_THE_DATA

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

LEAST_UNLIKE = 2


def leave_schedules_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no losses whose weight is another in each step while tokens and passes stay the same, or in each of
    several but those in which it is right; nor those of the first steps that a line multiplies by less than later."""
    conducts = [verdict.conduct for verdict in verdicts if verdict.conduct is not None]
    if len(conducts) < max(len(verdicts), 2) or not all(alike(one.rest, conducts[0].rest) for one in conducts):
        return
    passes = {(one.context.num_accumulation, one.context.num_microbatches) for one in verdicts}
    trained = [{one.param for one in verdict.held} for verdict in verdicts]
    if len(passes) != 1 or not set.intersection(*trained):
        return  # steps of several models, in turn
    tokens = [verdict.contributions.num_tokens for verdict in verdicts]
    lines = _warming_up(conducts, tokens)
    wrong = sorted(one.losses for one in conducts if not alike(one.losses * one.rest, 1.0))
    unlike = len(wrong) >= LEAST_UNLIKE and not any(alike(one, other) for one, other in pairwise(wrong))
    if not lines and not (len(conducts) >= LEAST_STEPS and unlike and len(set(tokens)) == 1 and tokens[0] is not None):
        return
    for verdict, conduct in zip(verdicts, conducts, strict=True):
        off = conduct.losses * conduct.rest
        errors = verdict.errors
        if len(errors) != 1 or errors[0].first_event is None or not alike(errors[0].factor.observed or 0.0, off):
            continue
        verdict.findings.remove(errors[0])
        verdict.effects.clear()
        others = (
            f"{' and '.join(lines)} multiplies them by that number in this step, and by another one in others, which "
            "are right but for it"
            if lines
            else "in every other step x another number, with as many tokens and passes"
        )
        verdict.reasons.append(
            f"the losses are x {off:.6g} of a mean over all tokens, and {others}: a coefficient that follows a "
            f"schedule, or a {OF_THE_DATA}"
        )


def may_warm_up(verdict: StepVerdict, earlier: Sequence[StepVerdict]) -> bool:
    """Whether what a step is accused of may be such a number, as long as few steps show the same one."""
    conduct, errors = verdict.conduct, verdict.errors
    if conduct is None or len(errors) != 1:
        return False
    number = prod(conduct.numbers.values())
    if not 0 < number < 1 or not alike(conduct.losses * conduct.rest, number):
        return False
    before = [prod(one.conduct.numbers.values()) for one in earlier if one.conduct is not None]
    return len(earlier) + 1 < LEAST_STEPS or not all(alike(one, number) for one in before)


def _warming_up(conducts: Sequence[Conduct], tokens: Sequence[int | None]) -> list[str]:
    """The lines that multiply losses by less in the first steps than in the last, where all steps are right but for
    these, and none is a number that tokens make: those of the step, or of another."""
    places = {place for one in conducts for place in one.numbers}
    known = {place: [one.numbers.get(place, 1.0) for one in conducts] for place in places}
    lines = sorted(place for place, numbers in known.items() if not all(alike(one, numbers[0]) for one in numbers))
    counted = {one / other for one, other in permutations([one for one in tokens if one], 2)} - {1.0}
    made = [prod(known[place][at] for place in lines) for at in range(len(conducts))]
    if made != sorted(made) or made[0] <= 0 or not alike(made[-1], 1.0):
        return []
    if not all(alike(one.losses * one.rest, number) for one, number in zip(conducts, made, strict=True)):
        return []
    numbers = [number for place in lines for number in known[place]]
    if any(alike(number, count) for number in numbers for count in counted):
        return []
    return lines if len(set(tokens)) == 1 or all(map(is_exactly_written, numbers)) else []

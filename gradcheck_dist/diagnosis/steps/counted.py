"""Divisions by a count of more tokens than enter the losses, by lines that nobody recorded.

In one step the factor is some number below 1, as a clip's is. In several it makes whole numbers of each step's tokens,
which a norm does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from gradcheck_dist.diagnosis.rules import gs303_wrong_normalizer as wrong_normalizer
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.words import in_short

SURE = 1e-4
"""Whole numbers in several steps that chance would make more often tell nothing: clips are frequent."""
EXACT = wrong_normalizer.EXACT
SMALL = 8
NAME = "count of tokens"
"""What a factor is made of that follows such counts."""


def counts(verdicts: Sequence[StepVerdict], code: str) -> dict[int, int] | None:
    """The number of tokens by which each step's losses were divided, from its findings of this code; None where those
    are no whole numbers, or might be so by chance. Steps without such a finding came out right."""
    found: dict[int, int] = {}
    chance = 1.0
    for verdict in verdicts:
        mine = [one for one in verdict.findings if one.code == code]
        tokens = verdict.contributions.num_tokens
        if not mine and verdict.comes_out_right:
            continue
        factor = mine[0].factor if len(mine) == 1 else None
        if verdict.context.objective != wrong_normalizer.GLOBAL or not tokens or factor is None:
            return None
        if not factor.observed or not 0 < factor.observed < 1:
            return None
        number = tokens / factor.observed
        width = max(2 * number * (factor.tolerance or 0.0), EXACT)
        if abs(number - round(number)) > width or number > tokens * wrong_normalizer.FEW:
            return None
        simple = Fraction(factor.observed).limit_denominator(SMALL)  # 2/3 of the passes, a coefficient
        if abs(float(simple) / factor.observed - 1) > width / number:
            chance *= min(2 * width, 1.0)
        found[verdict.context.step] = round(number)
    return found if len(found) > 1 and chance < SURE else None


def explanation(verdict: StepVerdict, counted: dict[int, int]) -> str:
    """What the counts of several steps say of one of them, in words."""
    told = in_short([str(number) for number in counted.values()])
    return (
        f"as if the step had {counted[verdict.context.step]} tokens, where {verdict.contributions.num_tokens} enter "
        f"the loss. So it is in {len(counted)} steps, by whole numbers ({told}): a count, and no clip."
    )


def fix(verdict: StepVerdict, counted: dict[int, int]) -> str:
    return wrong_normalizer.COUNTED.format(counted=counted[verdict.context.step])

"""Lines that divide accumulated gradients by the tokens of the pass just behind them.

`p.grad *= 1 / n` behind every pass divides by each pass's own tokens what all passes so far have left (as a wav2vec 2.0
example of transformers does), and behind the last one by that pass's tokens where those of all were due. The numbers
change from step to step, as what is computed from gradients does, but each is the inverse of a recorded count.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log, prod

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.finding import Factor, Finding
from gradcheck_dist.diagnosis.rules import (
    gs101_double_averaging,
    gs104_wrong_divisor,
    gs303_wrong_normalizer,
    gs305_partial_token_count,
)
from gradcheck_dist.diagnosis.steps.step_verdict import Change, StepVerdict, cause
from gradcheck_dist.diagnosis.weights.degrees import degrees_of, same

PER_PASS = "1/tokens of the pass"
UNDONE = (gs101_double_averaging.CODE, gs104_wrong_divisor.CODE, gs303_wrong_normalizer.CODE)
"""What the rest of the weights looks like where such a line is half of the normalisation."""
_AGAIN = (
    " The factor is the inverse of the tokens of the pass just before it, in every step: each pass divides all that "
    "has been accumulated, so the gradients of earlier passes are divided again."
)
_FIX = "Divide once, after the step's last pass, by the tokens of all its passes and ranks, or divide the losses by it."


CHANGES = 0.02
"""By how much numbers of tokens differ, relative, that no rounding makes alike."""


def of_pass(case: Case) -> str | None:
    """PER_PASS where a factor that nobody recorded is one over the tokens of its pass, of all ranks or their mean."""
    culprit = case.culprit
    recorded = case.context.contributions
    if not culprit.unrecorded or not culprit.factor or not 0 < culprit.factor < 1 or culprit.event is None:
        return None
    last = max((key[1] for key in recorded.by_key), default=0)
    # Reductions behind the last pass are numbered as the next one would be, and norms not at all.
    pass_of = min(getattr(culprit.event, "accumulation_step", last), last)
    counts = [one.num_tokens for one in recorded.by_key.values() if one.key[1] == pass_of]
    if len({key[1] for key in recorded.by_key}) < 2 or any(count is None for count in counts):
        return None
    total = sum(count or 0 for count in counts)
    near = max(1e-5, case.pattern.tolerance)
    numbers = {total, total / recorded.num_coordinates}
    return PER_PASS if any(number > 1 and abs(culprit.factor * number - 1) <= near for number in numbers) else None


def lay_to_passes(verdicts: Sequence[StepVerdict]) -> None:
    """Lay what such lines do, in all passes of a step, to one finding, with what else that makes look wrong: a loss or
    an average without the number by which the last pass divides. One number may be that of the last pass's tokens by
    chance: by these divides what changes with them from step to step, what is no number of passes or ranks either and
    acts again in each pass, or what makes up for another finding."""
    changes = [one for verdict in verdicts for one in verdict.changes if one.name == PER_PASS]
    told = [one.factor for one in changes if one.factor is not None]
    follows = bool(told) and max(told) > min(told) * (1 + CHANGES)
    for verdict in verdicts:
        listed = {id(finding) for finding in verdict.findings}
        changes = [one for one in verdict.changes if one.name == PER_PASS and id(one.finding) in listed]
        if not changes:
            continue
        again = any(not one.uniform for one in changes)
        kept = next((one for one in changes if not one.uniform), changes[0]).finding
        gone = [one.finding for one in changes if one.finding is not kept]
        undone = [one for one in verdict.findings if any(_makes_up(one, change) for change in changes)]
        degrees = degrees_of(verdict.contributions)
        of_degree = not follows and any(same(1 / number, degree) for number in told for degree in degrees)
        if not ((again and not of_degree) or follows or undone):
            continue
        for finding in [*gone, *undone]:
            verdict.findings = [one for one in verdict.findings if one is not finding]
            verdict.effects.pop(cause(finding), None)
        effect = verdict.effects.pop(cause(kept), None)
        kept.fix = _FIX
        if again:
            kept.explanation += _AGAIN
        else:
            _tell_last(kept, undone)
        if effect is not None and not (undone and not again):
            verdict.effects[cause(kept)] = effect


def _tell_last(finding: Finding, undone: Sequence[Finding]) -> None:
    """Say that the last pass's tokens alone divide; `undone` are findings that are the other half of this division."""
    finding.code, finding.name = gs305_partial_token_count.CODE, gs305_partial_token_count.NAME
    off = prod(one.factor.observed or 1.0 for one in (finding, *undone))
    if undone:
        finding.factor = Factor(observed=off, tolerance=finding.factor.tolerance)
        finding.pattern = f"every contribution x {off:.6g}"
    finding.explanation = (
        "What all passes accumulated is divided by the tokens of the last of them, in every step: those of the others "
        f"are not counted, and every token weighs x {off:.6g} of what it should."
    )


def _makes_up(finding: Finding, change: Change) -> bool:
    """Whether a finding and what such a line does undo one another in part."""
    off = finding.factor.observed
    if finding.code not in UNDONE or not off or off <= 0:
        return False
    numbers = [change.factor, change.finding.factor.observed if change.uniform else None]
    return any(number and number > 0 and abs(log(off * number)) < abs(log(off)) for number in numbers)

"""Clips that people write themselves, told from forgotten constants by the norm that they leave behind.

A clip by norm leaves the whole gradient with exactly max_norm, a number that somebody wrote; a constant leaves
whatever comes out. One step is enough for this, where the norm is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.own_lines import beside_computed, is_divided
from gradcheck_dist.diagnosis.causes.vocabulary import TOKENS, is_scale
from gradcheck_dist.diagnosis.finding import Candidate, Finding
from gradcheck_dist.diagnosis.norms.assumed import Assumed, Place, place_of
from gradcheck_dist.diagnosis.norms.clips import is_round
from gradcheck_dist.diagnosis.norms.left_norms import error_of, norm_afterwards
from gradcheck_dist.diagnosis.norms.step_norms import StepNorms
from gradcheck_dist.diagnosis.rules import gs000_unexplained_scale as unexplained
from gradcheck_dist.diagnosis.steps import counted
from gradcheck_dist.diagnosis.steps.most_alike import as_if_all_alike
from gradcheck_dist.diagnosis.steps.step_verdict import HIDDEN, Scaling, StepVerdict, cause
from gradcheck_dist.diagnosis.steps.undone_behind import leave_clipped_open
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.degrees import is_of_degrees
from gradcheck_dist.diagnosis.weights.factors import exact_fraction, name_number
from gradcheck_dist.diagnosis.words import that_write
from gradcheck_dist.events import GradientNorm
from gradcheck_dist.ledger.tracks import StepData

CODE = "GS501"
"""The finding that one step leaves open."""
Line = tuple[str, int]
"""File and line."""
AS_EVER = "nothing but lines that scale gradients in other steps, too"
SURE = 1e-2
SAME = 1e-3
TOO_VAGUE = 0.02
"""With a tolerance above this, every number is near to one that people write."""


@dataclass(frozen=True)
class HandClip:
    """All gradients were multiplied by `factor`, after which their norm was `norm`. `hidden`: Culprit.hidden. `reason`
    is why the verdict stays open all the same. `measured`: the norm was seen being taken, and what the gradients were
    then. `assumed`: what its lines must do besides; `place` and `line` are where they begin."""

    factor: float
    norm: float
    text: str
    hidden: tuple[float, ...] = ()
    reason: str = ""
    measured: bool = False
    assumed: Assumed | None = None
    place: Place = ()
    line: str = ""


def scaling_of(case: Case, data: StepData, norms: StepNorms) -> Scaling | None:
    """What one step cannot tell apart and several can: the factor, the norm that it left, how well that is known."""
    norm = norm_afterwards(case, data, norms) if case.could_be_clip else None
    if norm is None:
        return None
    own = case.culprit.factor or case.pattern.factor
    before = _assumed(case, data, case.pattern.factor / own)
    return Scaling(case.pattern.factor, norm, error_of(case, norms), case.culprit.lines, before)


def _assumed(case: Case, data: StepData, divisor: float) -> Assumed | None:
    """What lines that clip must divide by besides for weights to be right that are too large before them; None where
    they are not, or these lines were seen to do so."""
    if not divisor > 1 + TOO_VAGUE or is_divided(data, case.culprit, case.held, divisor):
        return None
    number = exact_fraction(divisor, 1e-3) or f"{divisor:.5g}"
    return Assumed(divisor, place_of(case.culprit), _after(case), number)


def _after(case: Case) -> str:
    place = case.culprit.event.site if case.culprit.event is not None else None
    return f" after {place.short}" if place else ""


def settle(verdicts: Sequence[StepVerdict]) -> list[StepVerdict]:
    """Scalings of several steps that are one and the same clip, or one and the same constant, taken for what they are.

    A clip's factor follows the norm and what it leaves does not change; a constant is the other way round, and a
    division by tokens follows these. What is neither, and is not there at all in steps that came out right, is taken
    for a clip.
    """
    known = [verdict.scaling for verdict in verdicts if verdict.scaling is not None]
    if len(known) > 1:
        tolerance = max(scaling.tolerance for scaling in known)
        factors, norms = [scaling.factor for scaling in known], [scaling.norm for scaling in known]
        if max(norms) <= min(norms) * (1 + 2 * tolerance) and max(factors) > min(factors) * (1 + 5 * tolerance):
            return [one if one.scaling is None else _to_norm(one, one.scaling) for one in verdicts]
        if max(factors) <= min(factors) * (1 + 2 * tolerance) and max(norms) > min(norms) * (1 + 5 * tolerance):
            for verdict in verdicts:
                _as_constant(verdict, len(known))
            return list(verdicts)
        if (name := _one_formula(verdicts)) is not None:
            for verdict in verdicts:
                _as_constant(verdict, len(known), name=name)
            return list(verdicts)
        own = _own_constant(verdicts)
        if own is not None and max(norms) > min(norms) * (1 + 5 * tolerance):
            for verdict in verdicts:
                _as_constant(verdict, len(known), own)
            return list(verdicts)
        if (numbers := counted.counts(verdicts, CODE)) is not None:
            for verdict in verdicts:
                _as_count(verdict, numbers)
            return list(verdicts)
    right = [verdict for verdict in verdicts if _came_right(verdict)]
    if right and not _one_factor(verdicts):
        always = set[Line]().union(*map(_scales_at, right))
        return [_as_scaled_at_times(verdict, always) for verdict in verdicts]
    for verdict in verdicts:
        if verdict.scaling is not None and any(finding.code == CODE for finding in verdict.findings):
            leave_clipped_open(verdict, verdict.scaling.factor, verdict.scaling.norm, verdict.scaling.tolerance)
    return list(verdicts)


def _one_factor(verdicts: Sequence[StepVerdict]) -> bool:
    """Whether several steps were scaled alike, which a clip that follows the norm would not do."""
    found = [one.factor for verdict in verdicts for one in verdict.findings if one.code == CODE]
    known = [factor.observed for factor in found if factor.observed is not None]
    tolerance = max((factor.tolerance or 0.0 for factor in found), default=0.0)
    return len(known) > 1 and max(known) <= min(known) * (1 + 2 * tolerance)


def _own_constant(verdicts: Sequence[StepVerdict]) -> float | None:
    """What unrecorded lines multiply by in every step alike, though the weights are off by another factor in each: what
    stands before these lines (the losses) is off as well. None where it is not one number."""
    found = [one for verdict in verdicts for one in verdict.findings if one.code == CODE]
    own = [one.first_event.observed_factor for one in found if one.first_event is not None]
    known = [factor for factor in own if factor is not None and 0 < factor < 1]
    tolerance = max((one.factor.tolerance or 0.0 for one in found), default=0.0)
    if len(known) < 2 or len(known) < len(found) or tolerance > TOO_VAGUE:
        return None
    return known[0] if max(known) <= min(known) * (1 + 2 * tolerance) else None


def _one_formula(verdicts: Sequence[StepVerdict]) -> str | None:
    """The expression that is what unrecorded lines multiply by in each of several steps, another number in each."""
    found = [one.factor for verdict in verdicts for one in verdict.findings if one.code == CODE]
    if len(found) < 2 or len(found) < len(verdicts):
        return None
    tolerance = max(factor.tolerance or 0.0 for factor in found)
    values = [{one.expression: one.value for one in factor.candidates} for factor in found]
    common = {name for name in values[0] if TOKENS in name and all(name in other for other in values)}
    for name in sorted(common, key=list(values[0]).index):
        numbers = [of_step[name] for of_step in values]
        if max(numbers) > min(numbers) * (1 + 2 * tolerance):
            return name
    return None


def _as_constant(verdict: StepVerdict, num_steps: int, own: float | None = None, name: str | None = None) -> None:
    """`own`: what the lines multiply by where the weights are off before them as well; `name`: what they multiply by,
    where that is another number in each step."""
    for finding in (finding for finding in verdict.findings if finding.code == CODE):
        effect = verdict.effects.pop(cause(finding), None)
        finding.code, finding.name, finding.severity = unexplained.CODE, unexplained.NAME, "error"
        finding.explanation = (
            f"The weights are off: {finding.pattern}, by nothing recorded. In {num_steps} steps it is one and the same "
            "factor, whatever the norm that it leaves: a constant, and no clip."
        )
        if name is not None:
            finding.explanation = (
                f"The weights are off: {finding.pattern}, by nothing recorded. In {num_steps} steps it is {name}, "
                "another number in each: a formula, and no clip."
            )
        if verdict.scaling is not None and verdict.scaling.lines:
            finding.explanation += f" In between, {that_write(verdict.scaling.lines, 'them')}."
        at_a_line = finding.first_event is not None and not finding.first_event.unrecorded
        finding.fix = unexplained.DROP_IT if at_a_line else unexplained.LOOK_BETWEEN
        if own is not None and finding.factor.observed:
            _tell_both(finding, verdict, num_steps, own, finding.factor.observed / own)
        finding.suggested_experiment = None
        if effect is not None:
            verdict.effects[cause(finding)] = effect


def _as_count(verdict: StepVerdict, numbers: dict[int, int]) -> None:
    """`numbers`: what the losses of each step are divided by, more than the tokens that enter them."""
    for finding in (finding for finding in verdict.findings if finding.code == CODE):
        _as_constant(verdict, len(numbers))
        finding.explanation = (
            f"The weights are off: {finding.pattern}, by nothing recorded, {counted.explanation(verdict, numbers)}"
        )
        finding.fix = counted.fix(verdict, numbers)
        for change in (change for change in verdict.changes if change.finding is finding):
            change.name = counted.NAME


def _tell_both(finding: Finding, verdict: StepVerdict, num_steps: int, own: float, before: float) -> None:
    """Say what of a factor is a constant of unrecorded lines, and what the weights were off by before them."""
    names = name_number(own, verdict.context.quantities, max(2 * (finding.factor.tolerance or 0.0), 1e-6))
    name = f" = {names[0].expression}" if names else ""
    finding.explanation = (
        f"The weights are off: {finding.pattern}. Lines that nobody recorded multiply by {own:.6g}{name}, one and the "
        f"same factor in {num_steps} steps, whatever the norm that it leaves: a constant, and no clip. Before it the "
        f"weights are x {before:.6g} already, and another number in other steps: what the loss divides by."
    )
    finding.fix = (
        f"Look whether the loss has divided by what these lines divide by once more (x {own:.6g}{name}), and whether "
        "it divides by the tokens that enter it."
    )


def _to_norm(verdict: StepVerdict, scaling: Scaling) -> StepVerdict:
    text = f"clipped by hand to norm {scaling.norm:.4g} (x {scaling.factor:.4g}), the same in several steps"
    clipped = _as_clip(verdict, scaling.factor, text)
    clipped.assumed = clipped.assumed or scaling.before
    leave_clipped_open(clipped, scaling.factor, scaling.norm, scaling.tolerance)
    return clipped


def _came_right(verdict: StepVerdict) -> bool:
    cells = [cell for held in verdict.held for cell in held.cells]
    return bool(cells) and not (verdict.findings or verdict.changes) and all(cell.right for cell in cells)


def _scales_at(verdict: StepVerdict) -> set[Line]:
    return verdict.conduct.scales_at if verdict.conduct is not None else set()


def _as_scaled_at_times(verdict: StepVerdict, always: set[Line]) -> StepVerdict:
    """`always`: the lines that scale in steps which came out right."""
    finding = next((finding for finding in verdict.findings if finding.code == CODE), None)
    factor = finding.factor.observed if finding is not None else None
    if finding is None or factor is None or not 0 < factor < 1:
        return verdict
    own = _scales_at(verdict)
    if own and own <= always:
        verdict.take_away(finding)
        verdict.reasons.append(
            f"step {verdict.context.step}: gradients are x {factor:.4g}, by {AS_EVER}, whose weights came out right: "
            "a clip in the same lines does this, and so does a count that is wrong in some steps"
        )
        return verdict
    text = f"clipped by hand (x {factor:.4g}, by lines that change nothing in other steps)"
    return _as_clip(verdict, factor, text)


def _as_clip(verdict: StepVerdict, factor: float, what: str) -> StepVerdict:
    weights = [
        msgspec.structs.replace(
            weight,
            observed=None if weight.observed is None else weight.observed / factor,
            ratio=None if weight.ratio is None else weight.ratio / factor,
        )
        for weight in verdict.weights
    ]
    text = f"step {verdict.context.step}: gradients were {what}; weights are freed of it"
    findings = [finding for finding in verdict.findings if finding.code != CODE]
    return replace(verdict, findings=findings, weights=weights, remarks=[*verdict.remarks, text])


def clip_by_hand(cases: Sequence[Case], data: StepData, norms: StepNorms) -> HandClip | None:
    """The clip among the cases of a step, when one surely is. Copies that a rank leaves out of its norm tell of it less
    than what the norm was taken of."""
    for case in sorted(cases, key=lambda case: not isinstance(case.culprit.event, GradientNorm)):
        if not case.scaled_alike:
            continue
        norm = norm_afterwards(case, data, norms)
        tolerance = error_of(case, norms)
        if norm is None or tolerance > TOO_VAGUE:
            continue
        factor, own = case.pattern.factor, case.culprit.factor or case.pattern.factor
        # Where the weights were off before it, the number may have put them right: tokens behind a clip of sums.
        right_before = len(cases) == 1 and abs(own / factor - 1) <= SAME
        quantities = None if right_before else case.context.quantities
        beside = beside_computed(data, case.culprit, case.held, quantities)
        last, known = (beside.number, 1.0) if right_before else (1.0, beside.number)
        left = norm
        reason = ""
        if last != 1 and is_round(norm / last, tolerance):
            if abs(norm / last - 1) > tolerance or not is_round(norm, tolerance):
                norm, left, factor, own = norm / last, norm / beside.behind, factor / last, own / last
            elif is_of_degrees(last, case.context.contributions):  # else it is the norm of the clip
                reason = _unit_or_clip(norm, last)
        unit = abs(norm - 1) <= tolerance
        if abs(norm / known - 1) <= tolerance or is_divided(data, case.culprit, case.held, 1 / norm):
            known = 1.0  # unit length times the norm that is meant
        if known != 1:
            own /= known  # what the clip itself did
            if factor < own * (1 - SAME):  # it multiplies by no written number: what is too small before it stays so
                reason = _normalised(norm, factor / own) if unit else ""
                factor = factor if unit else own
        elif abs(factor / own - 1) > SAME and _right_before(case, cases, factor / own, data):
            factor = own
        if not is_round(norm, tolerance) or (own > 1 - SAME and not unit):
            continue  # only to unit length gradients are made longer on purpose, and lines that do nothing clip nothing
        if factor > 1 > own:
            # A clip only shortens, so what is too long before and behind it was too long without it as well.
            before, factor = factor / own, factor if unit else own
            reason = _normalised(norm, before) if unit else ""
        line = _after(case)
        text = (
            f"step {data.step}: gradients were clipped by hand to norm {float(f'{left:.2g}'):g} (x "
            f"{factor:.4g}){line}; weights are freed of it"
        )
        divisor, assumed = factor / own, None
        if divisor > 1 + TOO_VAGUE:
            number = exact_fraction(divisor, 1e-3) or f"{divisor:.5g}"
            text += _besides(number)
            if known != 1 or not is_divided(data, case.culprit, case.held, divisor):
                assumed = Assumed(divisor, place_of(case.culprit), line, number)
        measured = isinstance(case.culprit.event, GradientNorm)
        return HandClip(
            factor, norm, text, case.culprit.hidden, reason, measured, assumed, place_of(case.culprit), line
        )
    return None


def _right_before(case: Case, cases: Sequence[Case], divisor: float, data: StepData) -> bool:
    """Whether the weights of some parameters were right before a clip, if its lines divide by nothing besides: they are
    off if these lines make up for what most were off by, which nobody saw them do."""
    if is_divided(data, case.culprit, case.held, divisor):
        return False
    others = (other.pattern for other in cases if other is not case)
    return any(other.kind == "uniform" and abs(other.factor * divisor - 1) <= SAME for other in others)


def clip_of_most(cases: Sequence[Case], judged: Sequence[Held], data: StepData, norms: StepNorms) -> HandClip | None:
    """The same, where something besides set some gradients apart from most: behind the clip, or before its norm."""
    for case in cases:
        if (alike := as_if_all_alike(case, cases, judged, data, norms)) is not None:
            instead = [alike[0], *(other for other in cases if other is not case)]
            return clip_by_hand(instead, data, alike[1]) or clip_by_hand(instead, data, norms)
    return None


def undone(cases: Sequence[Case], clip: HandClip) -> HandClip | None:
    """The clip that takes away besides what the weights were too large by where the norm was taken: a loss scale, or
    tokens that its own lines divide by. None where these are not what is wrong."""
    for case in cases:
        factor = case.pattern.factor
        if not (clip.measured and case.everywhere and case.pattern.kind == "uniform" and factor > 1):
            continue
        if is_scale(factor, SURE) or any(TOKENS in dict(name.powers) for name in case.names[:1]):
            number = exact_fraction(factor, 1e-3) or f"{factor:.5g}"
            return replace(clip, factor=clip.factor * factor, text=clip.text + _besides(number),
                           assumed=Assumed(factor, clip.place, clip.line, number, measured=True))  # fmt: skip
    return None


def _besides(number: str) -> str:
    """What else a clip's lines must do for the weights to be what they are taken for."""
    return f". The same lines are taken to divide by {number} besides"


def _normalised(norm: float, before: float) -> str:
    wrong = "lack a division by this number" if before > 1 else "were divided once too often"
    return (
        f"gradients were scaled by hand to norm {norm:.2g}, and all weights were x {before:.4g} before that: made to "
        f"unit length on purpose, any scale is right before it; clipped, they {wrong}. A step "
        "whose gradients are shorter than the clip's norm tells: record one, or clip at a larger norm"
    )


def _unit_or_clip(norm: float, last: float) -> str:
    return (
        f"gradients were scaled by hand to norm 1 and then by {last:.4g}, which leaves norm {norm:.4g}: unit length "
        "times the norm that is meant, or a clip to norm 1 with a number of ranks or passes behind it that is one too "
        "many. A step whose gradients are shorter than the clip's norm tells: record one, or clip at a larger one"
    )


def tell_hidden(case: Case, finding: Finding, hidden: Sequence[float]) -> None:
    """Say what a finding's factor may be as well, where the lines of a clip may divide by something besides."""
    if not case.everywhere or case.pattern.kind != "uniform" or case.culprit.unrecorded or finding.code == CODE:
        return
    for ratio in hidden:
        value = case.pattern.factor * ratio
        names = name_number(abs(value), case.context.quantities, max(2 * case.pattern.tolerance, 1e-6))
        expression = names[0].expression if names else f"{value:.6g}"
        number = exact_fraction(max(ratio, 1 / ratio), 1e-6) or f"{max(ratio, 1 / ratio):.6g}"
        if_so = (
            f"It is assumed that the same lines divide by {number} besides; if they do not,"
            if ratio > 1
            else (f"If the same lines divide by {number} besides,")
        )
        finding.explanation += (
            f" Behind it gradients are clipped by hand, by a number that nobody recorded. {if_so} the factor is "
            f"{value:.6g} = {expression}."
        )
        finding.factor.candidates.append(Candidate(expression=expression, value=value, evidence=HIDDEN))
        finding.suggested_experiment = (
            "Record a step in which gradients are not clipped, by a larger clip norm: nothing is hidden there."
        )


def freed(measured: list[Held], factor: float) -> list[Held]:
    """What was measured, freed of a clip by hand that multiplied it by `factor`."""
    return [held.freed(factor) for held in measured]

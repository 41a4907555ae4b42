"""What is wrong at one place in several steps has one law: the steps that tell laws apart say what the others show.

Where all ranks hold as many tokens in a step, the weights of a count that was not summed over ranks are those of a loss
that is multiplied by their number; where half of the tokens are some pass's, a factor of 2 is N / N_k. Other steps put
that to the test. A number that changes from step to step is none of the degrees, whatever it is in one step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import msgspec

from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.rules import gs000_unexplained_scale as unexplained
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause
from gradcheck_dist.diagnosis.steps.told_once import ALIKE, alike, take_over, tell_once, told_as
from gradcheck_dist.diagnosis.steps.windows import all_off_by
from gradcheck_dist.diagnosis.weights import shapes
from gradcheck_dist.diagnosis.weights.factors import Powers
from gradcheck_dist.diagnosis.weights.partial_counts import partitions
from gradcheck_dist.diagnosis.weights.patterns import Pattern
from gradcheck_dist.ledger.expected import OBJECTIVES, expected_weights

APART = 5e-3
"""Relative; so far apart are numbers that are others in each step, and not one with its noise."""
LEAST_OTHERS = 2
"""Of two numbers either may be the one that is there in most steps."""
_COUNTED = re.compile(r"num_|n_c|N_|L_|T_|clip|scale|norm")
"""In the name of a factor that is another one in other steps."""


@dataclass
class _Seen:
    """A finding of one step, and the shape of its weights."""

    verdict: StepVerdict
    finding: Finding
    pattern: Pattern


def tell_one_law(verdicts: Sequence[StepVerdict]) -> None:
    """Keep of the findings at one place those whose law holds in all steps that are wrong there."""
    for seen in _by_place(verdicts):
        if len({cause(one.finding) for one in seen}) > 1:
            _keep_law(seen)
    _keep_whole(verdicts)
    _keep_by_pass(verdicts)
    _keep_named(verdicts)
    tell_once(verdicts)
    for seen in _by_place(verdicts):
        _without_degrees(seen, verdicts)


def _by_place(verdicts: Sequence[StepVerdict]) -> list[list[_Seen]]:
    """What was found at each place that is wrong in steps, once in each, and of what shape it is."""
    places: dict[object, list[_Seen]] = defaultdict(list)
    for verdict in verdicts:
        here: dict[object, list[Finding]] = defaultdict(list)
        for finding in verdict.errors:
            if finding.first_event is not None:
                here[cause(finding)[1], *finding.ranks].append(finding)
        for place, found in here.items():
            pattern = verdict.shape_of(found[0])
            if len(found) == 1 and pattern is not None and found[0].factor.observed:
                places[place].append(_Seen(verdict, found[0], pattern))
    return list(places.values())


def _keep_law(seen: Sequence[_Seen]) -> None:
    """Take findings for those of another step whose law they follow as well."""
    laws = [one for one in seen if one.pattern.kind != "uniform" and all(_holds(one, other) for other in seen)]
    if not laws:
        return
    law = laws[0]
    for other in seen:
        if cause(other.finding) != cause(law.finding):
            other.verdict.take_away(other.finding)
            law.finding.steps = sorted({*law.finding.steps, *other.finding.steps})


def _keep_whole(verdicts: Sequence[StepVerdict]) -> None:
    """Take all findings of a step for the one finding of another whose law gives this step's weights, too."""
    accused = [(verdict, verdict.errors) for verdict in verdicts if verdict.errors]
    if not any(len(found) > 1 for _, found in accused):
        return
    for verdict, found in accused:
        pattern = verdict.shape_of(found[0]) if len(found) == 1 else None
        whole = found[0].num_parameters == len(verdict.units) and pattern is not None and not pattern.place
        others = [(other, errors) for other, errors in accused if other is not verdict]
        if pattern is None or not whole or pattern.kind == "uniform":
            continue
        if all(_gives(pattern, other, errors) for other, errors in others):
            take_over(found[0], others)
            return


def _keep_by_pass(verdicts: Sequence[StepVerdict]) -> None:
    """Take what is wrong in a step of fewer passes for the one finding of another, in which passes differ, where each
    pass is off by what the one of its number is off there: a window that ends early shows one number of several."""
    accused = [(verdict, verdict.errors) for verdict in verdicts if verdict.errors]
    for verdict, found in accused:
        pattern = verdict.shape_of(found[0]) if len(found) == 1 else None
        if pattern is None or pattern.kind == "uniform" or found[0].num_parameters < len(verdict.units):
            continue
        law = _by_pass(verdict)
        take_over(found[0], [(other, errors) for other, errors in accused if _repeats(law, other, errors)])


def _by_pass(verdict: StepVerdict) -> dict[tuple[int, int], list[float]]:
    """What the weights of a step are off by, by accumulation step and microbatch."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in verdict.weights:
        if one.ratio is not None:
            found[one.contribution.accumulation_step, one.contribution.microbatch].append(one.ratio)
    return found


def _repeats(law: Mapping[tuple[int, int], Sequence[float]], verdict: StepVerdict, errors: Sequence[Finding]) -> bool:
    """Whether each pass of a step is off by what that of its number is off by the law of one with more passes."""
    found = _by_pass(verdict)
    if not found or not found.keys() < law.keys() or any(cause(one) not in verdict.shapes for one in errors):
        return False
    near = max(ALIKE, *(2 * (one.factor.tolerance or 0.0) for one in errors))
    return all(abs(one - other) <= near * abs(other) for slot in found for one in found[slot] for other in law[slot])


def _keep_named(verdicts: Sequence[StepVerdict]) -> None:
    """Take all findings of a step for the one finding of another, on all weights, where the degrees and counts that
    make its factor give those of every step, and make other numbers in some; or where no other finding's do."""
    accused = [(verdict, verdict.errors) for verdict in verdicts if verdict.errors]
    if len({told_as(one) for _, found in accused for one in found}) == 1:
        return
    told = [verdict for verdict in verdicts if verdict.weights and (verdict.errors or not verdict.reasons)]
    by_weights = all(cause(one) in verdict.shapes for verdict, found in accused for one in found)
    for verdict, found in accused:
        powers = verdict.made_of.get(cause(found[0])) if len(found) == 1 and by_weights else None
        if not powers or found[0].num_parameters < len(verdict.units):
            continue
        others = [(other, errors) for other, errors in accused if other is not verdict]
        factors = [_product(powers, other.context.quantities) for other in told]
        alone = any(not alike(factor, found[0].factor.observed or 0.0) for factor in factors)
        alone = alone or all(_refuted(other, errors, verdict, found[0]) for other, errors in others)
        if alone and all(factor > 0 and all_off_by(other, factor) for other, factor in zip(told, factors, strict=True)):
            take_over(found[0], others)
            return


def _refuted(verdict: StepVerdict, errors: Sequence[Finding], other: StepVerdict, found: Finding) -> bool:
    """Whether what makes the factor of a step's one finding is another number in another step, if that is told so."""
    (one, *more) = errors
    powers = verdict.made_of.get(cause(one))
    if more or told_as(one) == told_as(found):
        return not more
    return powers is not None and not alike(_product(powers, other.context.quantities), found.factor.observed or 0.0)


def _product(powers: Powers, quantities: Mapping[str, float]) -> float:
    """The number that a step's degrees and counts make; 0 where it does not know one of them."""
    return prod(quantities.get(name, 0.0) ** power if quantities.get(name) else 0.0 for name, power in powers)


def _gives(pattern: Pattern, verdict: StepVerdict, errors: Sequence[Finding]) -> bool:
    """Whether a shape gives all weights of a step, in which nothing but weights was found wrong."""
    tokens = verdict.contributions.by_key
    predicted = dict(zip(tokens, _ratios(pattern, verdict), strict=False))
    known = [one for one in verdict.weights if one.ratio is not None]
    if not known or len(predicted) != len(tokens) or any(cause(one) not in verdict.shapes for one in errors):
        return False
    near = max(ALIKE, *(2 * (one.factor.tolerance or 0.0) for one in errors))
    at = [(one.contribution, one.ratio or 0.0) for one in known]
    ratios = [(predicted.get((key.data_rank, key.accumulation_step, key.microbatch)), off) for key, off in at]
    return all(ratio is not None and abs(off / ratio - 1) <= near for ratio, off in ratios)


def _holds(law: _Seen, other: _Seen) -> bool:
    """Whether what a finding says of its step is true of another one."""
    if law is other:
        return True
    mine, theirs = law.pattern, other.pattern
    if mine.place or theirs.place:
        # On some weights alone: one number that is no count can be compared without knowing which.
        off = other.finding.factor.observed or 0.0
        return mine.kind == "part" and mine.place == theirs.place and alike(mine.factor, off)
    predicted, found = _ratios(mine, other.verdict), _ratios(theirs, other.verdict)
    if not predicted or not found or (len(predicted) != len(found) and theirs.kind != "uniform"):
        return False
    found = found if len(predicted) == len(found) else [theirs.factor] * len(predicted)
    return all(alike(one, two) for one, two in zip(predicted, found, strict=True))


def _ratios(pattern: Pattern, verdict: StepVerdict) -> list[float]:
    """The ratio that a shape gives each contribution of a step; nothing where that is not known."""
    tokens = {key: one.num_tokens or 0 for key, one in verdict.contributions.by_key.items()}
    if not tokens or not all(tokens.values()):
        return []
    if pattern.kind == "uniform":
        return [pattern.factor for _ in tokens]
    if pattern.kind == "objective" and pattern.objective in OBJECTIVES:
        own, meant = (expected_weights(one, tokens) for one in (pattern.objective, verdict.context.objective))
        return [pattern.factor * float(own[key] / meant[key]) for key in tokens]
    total = sum(tokens.values())
    if pattern.kind == "partial" and pattern.count in ("N / N_r", "N / N_h"):
        of_rank = {(rank, 0, 0): 0 for rank in sorted({key[0] for key in tokens})}
        for key, count in tokens.items():
            of_rank[key[0], 0, 0] += count
        ways = partitions(list(of_rank), verdict.contributions.groups) if pattern.count == "N / N_h" else []
        in_groups = [way.tokens_of(of_rank) for way in ways if f"({way.words})" in pattern.text]
        return [pattern.factor * total / count for count in (in_groups or [of_rank])[0].values()]
    if pattern.kind == "power" and pattern.count is not None:
        name, _, power = pattern.count.partition("^")
        counted = shapes.counts(list(tokens), tokens, {}, 0.0).get(name, [])
        return [pattern.factor * one ** float(power) for one in counted]
    if pattern.kind == "partial":
        for way in partitions(list(tokens), verdict.contributions.groups):
            if pattern.text.startswith(f"the tokens of {way.words} instead"):
                return [pattern.factor * total / count for count in way.tokens_of(tokens).values()]
    return []


def _without_degrees(seen: Sequence[_Seen], verdicts: Sequence[StepVerdict]) -> None:
    """Drop the name of a factor on all weights that is made of degrees in one step, where other steps with as many
    passes have other numbers there."""
    for one in seen:
        name, mine = one.finding.factor.expression, one.finding.factor.observed or 0.0
        if name is None or _COUNTED.search(name) or one.pattern.kind != "uniform":
            continue
        off = [(verdict, factor) for verdict, factor in _factors(one, verdicts) if not alike(factor, 1.0)]
        if not any(verdict is one.verdict and alike(factor, mine) for verdict, factor in off):
            continue  # something else is wrong in this step as well
        others = [factor for verdict, factor in off if verdict is not one.verdict]
        apart = max(APART, 8 * (one.finding.factor.tolerance or 0.0))
        if len(others) < LEAST_OTHERS or any(abs(a / b - 1) <= apart for a, b in pairwise(sorted([mine, *others]))):
            continue
        one.verdict.effects.pop(cause(one.finding), None)
        nameless = next((two for verdict, factor in off if (two := _nameless(verdict, factor)) is not None), None)
        if nameless is not None:
            one.verdict.findings = [found for found in one.verdict.findings if found is not one.finding]
            nameless.steps = sorted({*nameless.steps, *one.finding.steps})
        else:
            in_others = ", ".join(f"x {factor:.6g}" for factor in others)
            one.verdict.findings = [
                _renamed(one, in_others) if found is one.finding else found for found in one.verdict.findings
            ]


def _nameless(verdict: StepVerdict, factor: float) -> Finding | None:
    """The one finding of a step, of all that its weights are off by, where nothing known makes that number."""
    errors = verdict.errors
    whole = len(errors) == 1 and errors[0].factor.expression is None and alike(errors[0].factor.observed or 0.0, factor)
    return errors[0] if whole else None


def _renamed(one: _Seen, in_others: str) -> Finding:
    return msgspec.structs.replace(
        one.finding,
        code=unexplained.CODE,
        name=unexplained.NAME,
        factor=msgspec.structs.replace(one.finding.factor, expression=None, candidates=[]),
        explanation=f"The weights are off: {one.pattern.text}, and in other steps with as many passes {in_others}: it "
        f"is {one.finding.factor.expression} in this step alone, so no degree makes it.",
        fix="Look for what changes from step to step and divides here, or in the loss: tokens, passes or samples of "
        "which some never went backward.",
        suggested_experiment=None,
    )


def _factors(seen: _Seen, verdicts: Sequence[StepVerdict]) -> Iterator[tuple[StepVerdict, float]]:
    """By what all weights are off, in each step with as many passes in which that is one number and no clip's."""
    sizes = seen.verdict.context.num_accumulation, seen.verdict.context.num_microbatches
    for verdict in verdicts:
        known = verdict.conduct if verdict.assumed is None and verdict.scaling is None else None
        if known is not None and (verdict.context.num_accumulation, verdict.context.num_microbatches) == sizes:
            yield verdict, known.losses * known.rest

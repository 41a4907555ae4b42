"""One fault that steps tell by several findings: the step that shows most of it says what the others are.

A count can be a power of two in one step, a rank can be out of tokens, a buffer may not be known in the first step:
then the same fault has another name there, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gradcheck_dist.diagnosis.finding import Finding, Weight
from gradcheck_dist.diagnosis.rules import gs000_unexplained_scale as unexplained
from gradcheck_dist.diagnosis.rules import gs604_clip_before_unscale as gs604
from gradcheck_dist.diagnosis.rules import gs605_early_clip as gs605
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause
from gradcheck_dist.diagnosis.weights.patterns import Pattern
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.expected import OBJECTIVES, expected_weights

ALIKE = 1e-4
"""Relative; numbers that are made of other counts lie further apart."""


def tell_once(verdicts: Sequence[StepVerdict]) -> None:
    """Keep of the findings of several steps the one that tells them all."""
    _keep_means(verdicts)
    _keep_recorded(verdicts)
    _keep_line(verdicts)
    _keep_bracket(verdicts)
    _keep_clip(verdicts)
    _keep_first_loss(verdicts)
    _keep_narrow(verdicts)


def _keep_means(verdicts: Sequence[StepVerdict]) -> None:
    """Take what is wrong in steps for the means that other steps show, where it is the same. Means are averaged over
    ranks or passes without tokens, too, which looks like an average that should not have come; where each rank holds
    tokens in one pass alone, means over ranks are those over passes."""
    accused = [(verdict, verdict.errors[0]) for verdict in verdicts if len(verdict.errors) == 1]
    for verdict, found in accused:
        pattern = verdict.shapes.get(cause(found))
        if pattern is None or pattern.objective not in OBJECTIVES or found.num_parameters < len(verdict.units):
            continue
        counted, everyone = _num_parts(verdict, pattern.objective)
        law = pattern.factor * everyone / max(counted, 1)
        others = [
            (other, other.errors)
            for other in verdicts
            if any(told_as(one) != told_as(found) for one in other.errors)
            if all(cause(one) in other.shapes for one in other.errors) and _is_mean_over(other, pattern, law)
        ]
        if others:
            take_over(found, others)
            return


def _is_mean_over(verdict: StepVerdict, pattern: Pattern, law: float) -> bool:
    """Whether all weights of a step are those of means over ranks or passes, of which some may be empty."""
    counted, everyone = _num_parts(verdict, pattern.objective or "")
    tokens = {key: one.num_tokens or 0 for key, one in verdict.contributions.by_key.items()}
    if counted == 0:
        return False
    own, meant = (expected_weights(one, tokens) for one in (pattern.objective or "", verdict.context.objective))
    known = [(_key(one), one.ratio) for one in verdict.weights if one.ratio is not None]
    return bool(known) and all(
        key in own and alike(ratio, law * counted / everyone * float(own[key] / meant[key])) for key, ratio in known
    )


def _num_parts(verdict: StepVerdict, objective: str) -> tuple[int, int]:
    """How many ranks or passes that a mean of means is over have tokens, and how many there are."""
    by_key, of_ranks = verdict.contributions.by_key, objective == "rank-token-mean"
    parts = {(key[0] if of_ranks else key): 0 for key in by_key}
    for key, one in by_key.items():
        parts[key[0] if of_ranks else key] += one.num_tokens or 0
    return sum(count > 0 for count in parts.values()), len(parts)


def _key(weight: Weight) -> ContributionKey:
    of = weight.contribution
    return of.data_rank, of.accumulation_step, of.microbatch


def _keep_recorded(verdicts: Sequence[StepVerdict]) -> None:
    """Take a shape that something unrecorded gave the weights of a step for what a record gives those of others: a
    gradient in a buffer that is not known yet in the first step."""
    accused = [(verdict, verdict.errors[0]) for verdict in verdicts if len(verdict.errors) == 1]
    for verdict, found in accused:
        pattern = verdict.shapes.get(cause(found))
        if pattern is None or pattern.kind == "uniform" or found.code == unexplained.CODE or _is_unrecorded(found):
            continue
        others = [
            (other, [one])
            for other, one in accused
            if one.code == unexplained.CODE and _is_unrecorded(one) and one.num_parameters == found.num_parameters
            if one.factor.expression == found.factor.expression and one.pattern == found.pattern
        ]
        if others and found.factor.expression is not None:
            take_over(found, others)
            return


def _is_unrecorded(found: Finding) -> bool:
    return found.first_event is None or found.first_event.unrecorded


def _keep_line(verdicts: Sequence[StepVerdict]) -> None:
    """Take what is between two events in a step for a line that was seen to write a wrong number in another one, where
    the same line scales gradients and all weights of both steps are off alike: degrees may make its number once. So is
    what has no name there, though the same line does it."""
    accused = [(verdict, verdict.errors[0]) for verdict in verdicts if len(verdict.errors) == 1]
    for verdict, found in accused:
        event = found.first_event
        if event is None or event.unrecorded or event.kind != "grad_write" or not _is_whole(verdict, found):
            continue
        line = (event.file, event.line)
        others = [
            (other, [one])
            for other, one in accused
            if one.first_event is not None and one.code in (found.code, unexplained.CODE)
            if one.first_event.unrecorded or (one.first_event.file, one.first_event.line) == line
            if cause(one) != cause(found)
            if _is_whole(other, one) and alike(one.factor.observed or 0.0, found.factor.observed or 0.0)
            if other.conduct is not None and line in other.conduct.scales_at
        ]
        if others:
            take_over(found, others)
            return


def _keep_bracket(verdicts: Sequence[StepVerdict]) -> None:
    """Take the line that has a wrong number in some steps and what is between two events around it in others for one
    fault, told as in most steps, where all weights are off by one number in each: a number that follows counts is
    written or a power of two by chance, which is what tells the line from the loss in front of it."""
    accused = [(verdict, verdict.errors[0]) for verdict in verdicts if len(verdict.errors) == 1]
    whole = [(verdict, one) for verdict, one in accused if one.code == unexplained.CODE and _is_whole(verdict, one)]
    brackets: dict[object, list[tuple[StepVerdict, Finding]]] = defaultdict(list)
    for verdict, found in whole:
        if _is_unrecorded(found):
            brackets[cause(found)].append((verdict, found))
    for members in brackets.values():
        lines: dict[object, list[tuple[StepVerdict, Finding]]] = defaultdict(list)
        for verdict, one in whole:
            if not _is_unrecorded(one) and all(_encloses(around, found, one) for around, found in members):
                lines[cause(one)].append((verdict, one))
        if not lines:
            continue
        others = max(lines.values(), key=len)
        told, rest = (others, members) if len(others) > len(members) else (members, others)
        take_over(told[0][1], [(verdict, [one]) for verdict, one in rest])


def _encloses(verdict: StepVerdict, found: Finding, one: Finding) -> bool:
    """Whether the line of a finding scales gradients in another step between the events that enclose what is wrong
    there."""
    line, event = one.first_event, found.first_event
    if line is None or line.kind != "grad_write" or event is None or event.before is None:
        return False
    writes = [write for (_, _, factor), write in verdict.writes.items() if factor != 1]
    return any(
        (write.file, write.line) == (line.file, line.line) and event.seq < write.seq < event.before["seq"]
        for write in writes
    )


def _keep_clip(verdicts: Sequence[StepVerdict]) -> None:
    """Take a clip that seems to be of scaled gradients in few steps for the early one that it is in most: what divides
    behind it, tokens, is a power of two there."""
    clips: dict[object, list[tuple[StepVerdict, Finding]]] = defaultdict(list)
    for verdict in verdicts:
        for found in verdict.errors:
            if found.code in (gs604.CODE, gs605.CODE) and (event := found.first_event) is not None:
                clips[event.kind, event.file, event.line].append((verdict, found))
    for members in clips.values():
        early = [found for _, found in members if found.code == gs605.CODE]
        scaled = [(verdict, [found]) for verdict, found in members if found.code == gs604.CODE]
        if len(early) > len(scaled):
            take_over(early[0], scaled)


def _keep_first_loss(verdicts: Sequence[StepVerdict]) -> None:
    """Take what all losses lack alike for one fault, where another one is the first in other steps (the branches of a
    condition) and all go backward on one line."""
    kinds: dict[object, list[tuple[StepVerdict, Finding]]] = defaultdict(list)
    for verdict in verdicts:
        for found in verdict.errors if len(verdict.errors) == 1 else ():
            event = found.first_event
            if event is not None and event.kind == "loss" and event.configured_at and _is_whole(verdict, found):
                kinds[found.code, found.factor.expression, event.configured_at].append((verdict, found))
    for members in kinds.values():
        first = members[0][1]
        others = [(verdict, [one]) for verdict, one in members if told_as(one) != told_as(first)]
        if all(alike(one.factor.observed or 0.0, first.factor.observed or 0.0) for _, one in members):
            take_over(first, others)


def _keep_narrow(verdicts: Sequence[StepVerdict]) -> None:
    """Take one number by which all weights of several steps are off for one fault, where nothing recorded tells of it
    in some: a recorded event of the others says more, else what was found in most steps does. In the first step a
    buffer of the program's may not be known yet, and what is reduced in it is not seen."""
    kinds: dict[str, list[tuple[StepVerdict, Finding]]] = defaultdict(list)
    for verdict in verdicts:
        for found in verdict.errors if len(verdict.errors) == 1 else ():
            if found.factor.expression is not None and _is_whole(verdict, found):
                kinds[found.factor.expression].append((verdict, found))
    for members in kinds.values():
        places: dict[object, list[tuple[StepVerdict, Finding]]] = defaultdict(list)
        for verdict, found in members:
            places[told_as(found)].append((verdict, found))
        loose = [one for _, one in members if one.code == unexplained.CODE and _is_unrecorded(one)]
        if len(places) != 2 or not loose:
            continue
        told, rest = sorted(places.values(), key=lambda of: (_is_unrecorded(of[0][1]), -len(of)))
        if all(alike(one.factor.observed or 0.0, told[0][1].factor.observed or 0.0) for _, one in rest):
            take_over(told[0][1], [(verdict, [one]) for verdict, one in rest])


def _is_whole(verdict: StepVerdict, found: Finding) -> bool:
    """Whether a finding says of all weights of a step that they are off by one number."""
    pattern = verdict.shapes.get(cause(found))
    return pattern is not None and pattern.kind == "uniform" and found.num_parameters == len(verdict.units)


def take_over(finding: Finding, others: Sequence[tuple[StepVerdict, Sequence[Finding]]]) -> None:
    """Tell what is wrong in other steps by a finding of this one."""
    for other, errors in others:
        for one in errors:
            if told_as(one) != told_as(finding):
                other.take_away(one)
        finding.steps = sorted({*finding.steps, other.context.step})


def told_as(finding: Finding) -> tuple[object, ...]:
    """Equal for findings that are one."""
    return cause(finding), finding.factor.expression


def alike(one: float, other: float) -> bool:
    """Whether two numbers are one."""
    return abs(one - other) <= ALIKE * max(abs(one), abs(other))

"""Losses that are too large by tokens or a loss scale, where lines behind them may take that away again.

Sums that are clipped and divided by the step's tokens afterwards are right, if the clip's norm knows of the tokens.
Where it is known what such lines do, diagnosis/steps/hand_clip.py looks at them. Lines of which only that is known that
they shorten gradients, by another number in each step or on each rank, may divide by the tokens besides. And what is
divided by half before such lines may be divided by the other half in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradcheck_dist.diagnosis.causes.vocabulary import TOKENS, is_scale
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.norms.clips import is_round
from gradcheck_dist.diagnosis.rules import gs601_local_clip_norm as local_clip
from gradcheck_dist.diagnosis.steps.step_verdict import Change, StepVerdict, cause

SURE = 1e-2


def leave_undone_open(changes: Iterable[tuple[StepVerdict, Change]]) -> None:
    """Take back what losses are accused of, where a change that is no constant may make up for it."""
    for verdict, change in changes:
        factors = [factor for factor, _ in change.factors.values()]
        for finding in list(verdict.findings):
            if change.num_parameters < finding.num_parameters:
                continue
            if _may_be_undone(verdict, finding, factors):
                _leave_open(verdict, finding, change.words)
            elif _is_one_of_two(verdict, finding, change):
                verdict.take_away(finding)
                verdict.reasons.append(
                    f"weights are x {finding.factor.observed:.6g} where {change.words} changes them: if a number is "
                    "divided by in two parts, before and behind it, the second part is among these lines"
                )


def _is_one_of_two(verdict: StepVerdict, finding: Finding, behind: Change) -> bool:
    """Whether lines that put weights right by half, by a number that nothing is known by, come before other lines of
    which nothing is known but that they change gradients: a division by sqrt(ranks) on either side of a reduction."""
    halves = [one for one in verdict.changes if one.finding is finding and one.makes_up and one.uniform]
    first, then = finding.first_event, behind.finding.first_event
    known = finding.factor.expression is not None
    return bool(halves) and not known and first is not None and then is not None and first.seq < then.seq


def leave_clipped_open(verdict: StepVerdict, factor: float, norm: float, tolerance: float) -> None:
    """The same for a clip by hand that several steps tell: it multiplied by `factor` and left `norm`. If nobody writes
    that number, its lines do something besides."""
    for finding in list(verdict.findings):
        if not is_round(norm, tolerance) and _may_be_undone(verdict, finding, [factor]):
            _leave_open(verdict, finding, f"a clip by hand behind it, which leaves norm {norm:.4g},")


def leave_assumed_open(verdicts: Iterable[StepVerdict]) -> None:
    """The same for the lines of a clip by hand that are taken to divide by one number already, as no other step shows:
    they may divide by this one besides."""
    for verdict in verdicts:
        assumed = verdict.assumed
        if assumed is None or assumed.reason not in verdict.reasons:
            continue
        for finding in list(verdict.findings):
            if _may_be_undone(verdict, finding, []):
                _leave_open(verdict, finding, f"a clip by hand{assumed.where}")


def leave_clipped_by_rank_open(verdicts: Iterable[StepVerdict]) -> None:
    """The same for a clip by hand by each rank's own norm, which stays a finding: what else its lines divide by is in
    the numbers by which it shortens."""
    for verdict in verdicts:
        for clip in [one for one in verdict.findings if one.code == local_clip.CODE]:
            event = clip.first_event
            if event is None or event.kind == "clip":  # of torch's own, which divides by nothing else
                continue
            line = f" at {event.place.rpartition('/')[2]}" if event.line else ""
            for finding in list(verdict.findings):
                if finding.num_parameters <= clip.num_parameters and _may_be_undone(verdict, finding, []):
                    _leave_open(verdict, finding, f"a clip by hand{line}")


def _leave_open(verdict: StepVerdict, finding: Finding, words: str) -> None:
    verdict.take_away(finding)
    verdict.reasons.append(
        f"weights are x {finding.factor.observed:.6g} from the loss on, and {words} makes gradients "
        "shorter still: if it divides by this number as well, no division is missing. Where gradients are "
        "clipped before they are divided by tokens, the clip's norm has to be multiplied by these"
    )


def _may_be_undone(verdict: StepVerdict, finding: Finding, factors: Sequence[float]) -> bool:
    event, off, shape = finding.first_event, finding.factor.observed, verdict.shape_of(finding)
    if event is None or event.kind != "loss" or event.unrecorded or off is None or off <= 1:
        return False
    if shape is None or shape.kind != "uniform":
        return False
    if not is_scale(off, SURE) and TOKENS not in dict(verdict.made_of.get(cause(finding), ())):
        return False
    # What is left when this number is taken out of it is a clip, which only shortens.
    return all(factor > 0 and factor * off <= 1 + SURE for factor in factors)

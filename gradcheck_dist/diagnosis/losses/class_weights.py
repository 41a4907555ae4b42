"""Losses whose classes have weights: what they count is the sum of their labels' weights, or the labels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from gradcheck_dist.diagnosis.causes.vocabulary import LOSS_SCALE
from gradcheck_dist.diagnosis.weights.cells import MATERIAL, loss_rounding
from gradcheck_dist.diagnosis.weights.degrees import is_of_degrees
from gradcheck_dist.diagnosis.weights.fractions import fraction_of
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions

SCALES = (1.0, *(2.0**exponent for exponent in range(int(LOSS_SCALE), 25)))
"""What a loss may be multiplied by until it is taken out again: powers of two, as loss scalers have."""


def by_class_weights(contributions: Contributions) -> Contributions | None:
    """The same with the sum of the labels' class weights in the place of their number."""
    by_key: dict[ContributionKey, Contribution] = {}
    for key, contribution in contributions.by_key.items():
        loss, count = contribution.loss, contribution.num_tokens
        if loss is None or loss.num_weighted_tokens is None or count is None or contribution.weight is None:
            return None
        total = fraction_of(loss.num_weighted_tokens)
        of_mean = loss.reduction == "mean" and total > 0  # a pass whose labels are all ignored has neither
        weight = contribution.weight * (count / float(total) if of_mean else 1.0)
        by_key[key] = replace(contribution, num_tokens=total, weight=weight)  # type: ignore[arg-type]
    return replace(contributions, by_key=by_key) if by_key else None


def tells(contributions: Contributions) -> bool:
    """Whether what is counted here makes the losses' weights: each is one over the count of the step, of its rank, of
    its pass on all ranks, or of its own, times one number of passes and ranks, and a loss scale."""
    counted = [one for one in contributions.by_key.values() if one.num_tokens]
    rounding = max(MATERIAL, loss_rounding(contributions))
    for part in (_of_step, _of_rank, _of_pass, _of_its_own):
        sums: dict[ContributionKey, float] = defaultdict(float)
        for one in counted:
            sums[part(one.key)] += float(one.num_tokens or 0)
        times = [(one.weight or 0.0) * sums[part(one.key)] for one in counted]
        alike = bool(times) and max(times) - min(times) <= rounding * max(times)
        if alike and any(is_of_degrees(times[0] / scale, contributions, rounding) for scale in SCALES):
            return True
    return False


def _of_step(_: ContributionKey) -> ContributionKey:
    return (-1, -1, -1)


def _of_rank(key: ContributionKey) -> ContributionKey:
    return (key[0], -1, -1)


def _of_pass(key: ContributionKey) -> ContributionKey:
    return (-1, *key[1:])


def _of_its_own(key: ContributionKey) -> ContributionKey:
    return key

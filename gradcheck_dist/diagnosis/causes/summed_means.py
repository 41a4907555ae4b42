"""Sums over ranks of losses that are whole means of each rank's own: an average is missing, there or at the loss."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from gradcheck_dist.diagnosis.causes.account import account
from gradcheck_dist.diagnosis.causes.culprit import Culprit, order
from gradcheck_dist.diagnosis.causes.places import caller_of
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import StepData

EXACT = 1e-3
"""Relative: how near to one mean the weights of a rank's tokens must come together."""
NOISE = 0.02
"""The same of what was measured between two events."""


def summing(data: StepData, contributions: Contributions, judged: Iterable[Held]) -> Culprit | None:
    """The reduction that adds up the whole means of all data ranks, where no reduction divides by anything.

    The weights of each rank's own tokens come to what all ranks' should together, 1 or, for tasks that are means of
    their own, one each, with what lines that write to gradients divide by (passes): its losses are complete, and right
    for an average. Divided by the tokens of all ranks, as is right for a sum, they would come to the rank's share of
    these.
    """
    found: list[Culprit] = []
    seen: set[tuple[object, ...]] = set()
    for held in judged:
        if held.signature in seen or not held.cells:
            continue
        seen.add(held.signature)
        culprit = _summing(data, contributions, held) or _summing(data, contributions, held, by_lines=True)
        if culprit is None:
            return None
        found.append(culprit)
    if len({caller_of(one.event) for one in found if one.event is not None}) != 1:
        return None
    return min(found, key=order)


def _summing(data: StepData, contributions: Contributions, held: Held, *, by_lines: bool = False) -> Culprit | None:
    """The last reduction on the way to one parameter, where it does so. `by_lines`: with what lines that nobody
    recorded divide by, as it was measured."""
    whole: dict[int, float] = {}
    expected: dict[ContributionKey, float] = {}
    rounding = EXACT
    last: Reduce | None = None
    num_ranks = contributions.num_coordinates
    for cell in held.cells:
        accounted = account(data, held, cell)
        reductions = [(step, step.event) for step in accounted.steps if isinstance(step.event, Reduce)]
        if not reductions or abs(prod(step.factor for step, _ in reductions) - 1) > EXACT:
            return None
        divided = prod(gap.factor for gap in accounted.gaps)
        if abs(divided * num_ranks - 1) <= NOISE if by_lines else divided * num_ranks < 1 + EXACT:
            return None  # lines that nobody recorded divide by as many
        last = reductions[-1][1]
        contribution = contributions.by_key[cell.key]
        loss_dtype = contribution.loss.dtype if contribution.loss is not None else "bfloat16"
        rounding = max(rounding, EPSILON.get(loss_dtype, EPSILON["float32"]))
        weight = (
            accounted.documented
            * (divided if by_lines else 1.0)
            * float(cell.expected)
            * (contribution.num_tokens or 0)
        )
        whole[cell.key[0]] = whole.get(cell.key[0], 0.0) + weight
        expected[cell.key] = float(cell.expected) * (contribution.num_tokens or 0)
    if len(whole) < 2 or len(whole) != num_ranks:
        return None
    asked = sum(expected.values())
    if last is None or any(abs(total - asked) > rounding * asked for total in whole.values()):
        return None
    return Culprit("reduce", held.rank, last, nominal=1.0, factor=1.0, wrong_constant=True)


def bare_means(contributions: Contributions) -> bool:
    """Whether each loss enters backward as the mean over its own tokens, times nothing."""
    return all(
        one.loss is not None
        and one.loss.reduction == "mean"
        and one.num_tokens
        and one.weight is not None
        and abs(one.weight * one.num_tokens - 1) <= max(EXACT, EPSILON.get(one.loss.dtype, EPSILON["float32"]))
        for one in contributions.by_key.values()
    )

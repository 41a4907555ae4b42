"""Losses that divide by a number which counts nothing, another in each step: a statistic of the program's own.

RetinaNet's normaliser is a running mean of counts, on each rank one of its own. A count that is wrong is a whole
number, or one over a degree, or a ratio of recorded counts; what is none of these in most steps was not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.losses.own_objective import loss_rounding
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.extra_counts import extra_counts
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.contributions import Contributions

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

RULES = frozenset({"GS000", "GS301", "GS302", "GS303"})
"""What such losses are told as: any scale, what begins at the tokens of a rank or its pass, one number on all ranks."""
LEAST_STEPS = 3
EXACT = 1e-5
"""Relative; quotients of one number lie nearer together."""
NEAR = 0.01
"""Nearer to a whole number than this, something may have been counted."""
SURE = 0.02
"""Chance makes no more of the ratios that a count is looked for in."""


@dataclass(frozen=True)
class OwnDivisors:
    """What each data rank's losses of a step divide by, and its tokens. `rounding` is relative, that of a divisor.
    `counted`: counts of more tokens than enter the losses explain them."""

    by_rank: Mapping[int, float]
    tokens: Mapping[int, int]
    rounding: float
    counted: bool


def own_divisors(contributions: Contributions) -> OwnDivisors | None:
    """None where the contributions of a rank are divided apart, or one of them is not counted."""
    rounding = 2 * loss_rounding(contributions)
    weights: dict[int, list[float]] = defaultdict(list)
    tokens: dict[int, int] = defaultdict(int)
    for key, one in contributions.by_key.items():
        if not one.weight or one.weight < 0 or not one.num_tokens:
            return None
        weights[key[0]].append(one.weight)
        tokens[key[0]] += one.num_tokens
    if not weights or any(max(values) > min(values) * (1 + rounding) for values in weights.values()):
        return None
    by_rank = {rank: 1 / values[0] for rank, values in weights.items()}
    return OwnDivisors(by_rank, dict(tokens), rounding, extra_counts(contributions) is not None)


def leave_statistics_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no losses that divide on each rank, in each step, by another number that surely counts nothing."""
    judged = [one for one in verdicts if one.contributions.by_key and not one.context.relative]
    divided = [(one, one.own_divisors) for one in judged if one.own_divisors is not None]
    found = [_at_loss(verdict.findings) for verdict, _ in divided]
    accused = [one.first_event for here in found for one in here if one.first_event is not None]
    if len(divided) < len(judged) or sum(map(bool, found)) < max(LEAST_STEPS, len(judged) - 1):
        return
    if len({(event.file, event.line) for event in accused}) != 1 or not _change(divided):
        return
    counts = {one.num_tokens or 0 for verdict in judged for one in verdict.contributions.by_key.values()}
    unexplained = [
        not any(one.factor.expression for one in here) and not _counts(numbers, rank, verdict.context, counts)
        for (verdict, numbers), here in zip(divided, found, strict=True)
        for rank in numbers.by_rank
    ]
    if 2 * sum(unexplained) <= len(unexplained):
        return
    first, numbers = next(one for one, here in zip(divided, found, strict=True) if here)
    told = in_short([f"{divisor:.6g}" for _, divisor in sorted(numbers.by_rank.items())])
    reason = (
        f"the losses divide by {told}{' (by data rank)' if len(numbers.by_rank) > 1 else ''} in step "
        f"{first.context.step}, in every other step by other numbers, and no count makes most of these: a running mean "
        "or another function of the data, which may be meant. gradcheck_dist.mark_loss(loss_sum, num_tokens) on the "
        "loss before it is divided tells"
    )
    for (verdict, _), here in zip(divided, found, strict=True):
        if here:
            verdict.findings = [one for one in verdict.findings if one not in here]
            verdict.effects.clear()
            verdict.reasons.append(reason)


def _at_loss(findings: Iterable[Finding]) -> list[Finding]:
    return [
        one
        for one in findings
        if one.code in RULES
        and one.severity != "info"
        and one.first_event is not None
        and one.first_event.kind == "loss"
        and not one.first_event.unrecorded
    ]


def _change(divided: Sequence[tuple[StepVerdict, OwnDivisors]]) -> bool:
    """Whether each rank divides by another number in each step, and by another multiple of its tokens and of all."""
    series: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _, numbers in divided:
        for rank, divisor in numbers.by_rank.items():
            series[rank, "alone"].append(divisor)
            series[rank, "of its own"].append(divisor / numbers.tokens[rank])
            series[rank, "of all"].append(divisor / sum(numbers.tokens.values()))
    ordered = [sorted(values) for values in series.values()]
    return all(other > one * (1 + EXACT) for values in ordered for one, other in pairwise(values))


def _counts(numbers: OwnDivisors, rank: int, context: StepContext, counts: Iterable[int]) -> bool:
    """Whether a divisor may be a count over degrees, or a rank's tokens times a count over another, or over one of too
    many."""
    degrees = {value for name, value in context.quantities.items() if name != "num_tokens" and value > 1}
    multiples = {1.0, *degrees, *(one * other for one, other in combinations(sorted(degrees), 2))}
    divisor, rounding = numbers.by_rank[rank], numbers.rounding
    if numbers.counted or any(_whole(divisor * one, max(NEAR, divisor * one * rounding)) for one in multiples):
        return True
    ratios = [divisor * one * count / numbers.tokens[rank] for one in multiples for count in counts if count]
    if 2 * sum(ratio * rounding for ratio in ratios) > SURE:
        return False
    return any(_whole(ratio, ratio * rounding) for ratio in ratios)


def _whole(number: float, tolerance: float) -> bool:
    return abs(number - round(number)) <= tolerance

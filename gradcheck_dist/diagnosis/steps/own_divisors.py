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
from gradcheck_dist.diagnosis.weights.cells import loss_rounding
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.extra_counts import extra_counts
from gradcheck_dist.diagnosis.weights.factors import has_name
from gradcheck_dist.diagnosis.words import OF_THE_DATA, in_short
from gradcheck_dist.events import AmpUnscale
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.tracks import StepData

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

RULES = frozenset({"GS000", "GS301", "GS302", "GS303"})
"""What such losses are told as: any scale, what begins at the tokens of a rank or its pass, one number on all ranks."""
LEAST_STEPS = 3
EXACT = 1e-5
"""Relative; quotients of one number lie nearer together."""
NEAR = 0.01
"""Nearer to a whole number than this, something may have been counted."""
VAGUE = 0.25
"""A number that is known no better than this is near to a whole one, whatever it is."""
SURE = 0.02
"""Chance makes no more of the ratios that a count is looked for in."""
MORE = 1.5
"""No count of labels before a shift, or with padding, is taken for more than so many times the tokens."""
FEW = 0.25
"""A count is one in all but so many of the passes: a guard takes another number now and then."""


@dataclass(frozen=True)
class Divisor:
    """What losses divide by, whatever their sign, and the tokens that enter them: those of a data rank's whole step
    where all of its passes divide by one number, else those of one pass."""

    value: float
    tokens: int

    @property
    def counts_more(self) -> bool:
        """Whether it is a whole number, larger than the tokens, but not by much."""
        whole = round(self.value)
        return self.tokens < whole <= MORE * self.tokens and abs(self.value / whole - 1) <= EXACT


@dataclass(frozen=True)
class OwnDivisors:
    """What each data rank's losses of a step divide by. `rounding` is relative, that of a divisor; `tokens` those of
    the step. `counted`: counts of more tokens than enter the losses explain them."""

    by_rank: Mapping[int, tuple[Divisor, ...]]
    tokens: int
    rounding: float
    counted: bool

    @property
    def all(self) -> list[Divisor]:
        return [one for of_rank in self.by_rank.values() for one in of_rank]


def own_divisors(contributions: Contributions, data: StepData) -> OwnDivisors | None:
    """None where one of the contributions is not counted, or they carry loss scales that are not one number."""
    rounding = 2 * loss_rounding(contributions)
    scales = {event.scale for of_rank in data.events.values() for event in of_rank if isinstance(event, AmpUnscale)}
    if len(scales) > 1:
        return None
    scale = scales.pop() if scales else 1.0
    of_rank: dict[int, list[Divisor]] = defaultdict(list)
    for key, one in contributions.by_key.items():
        if not one.weight or not one.num_tokens:
            return None
        of_rank[key[0]].append(Divisor(scale / abs(one.weight), one.num_tokens))
    if not of_rank:
        return None
    by_rank = {rank: _one_of_all(found, rounding) for rank, found in of_rank.items()}
    total = sum(one.tokens for found in by_rank.values() for one in found)
    return OwnDivisors(by_rank, total, rounding, extra_counts(contributions) is not None)


def _one_of_all(found: Sequence[Divisor], rounding: float) -> tuple[Divisor, ...]:
    values = [one.value for one in found]
    if max(values) > min(values) * (1 + rounding):
        return tuple(found)
    return (Divisor(values[0], sum(one.tokens for one in found)),)


def leave_statistics_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no losses that divide on each rank, in each step, by other numbers that surely count nothing."""
    judged = [one for one in verdicts if one.contributions.by_key and not one.context.relative]
    divided = [(one, one.own_divisors) for one in judged if one.own_divisors is not None]
    found = [_at_loss(verdict.findings) for verdict, _ in divided]
    accused = [one.first_event for here in found for one in here if one.first_event is not None]
    if len(divided) < len(judged) or sum(map(bool, found)) < max(LEAST_STEPS, len(judged) - 1):
        return
    if len({event.place for event in accused}) != 1 or not _change([numbers for _, numbers in divided]):
        return
    named = [any(has_name(one.factor.expression) for one in here) for here in found]
    known = _explained(divided, named)
    if known is True:
        return
    first, numbers = next(one for one, here in zip(divided, found, strict=True) if here)
    told = in_short([f"{one.value:.6g}" for one in numbers.all])
    several = " (by data rank)" if len(numbers.by_rank) > 1 else ""
    if len(numbers.all) > len(numbers.by_rank):
        several = f" (by {'data rank and ' if several else ''}backward pass)"
    why = "no count makes most of these" if known is False else "rounded so far that no count could be told from these"
    reason = (
        f"the losses divide by {told}{several} in step {first.context.step}, in every other step by other numbers, and "
        f"{why}: a running mean or another {OF_THE_DATA}"
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


def _change(divided: Sequence[OwnDivisors]) -> bool:
    """Whether each rank goes on to divide by other numbers, and by other multiples of its tokens and of all."""
    rounding = max(EXACT, *(numbers.rounding / 2 for numbers in divided))
    series: dict[tuple[int, str], list[float]] = defaultdict(list)
    for numbers in divided:
        for rank, found in numbers.by_rank.items():
            for one in found:
                series[rank, "alone"].append(one.value)
                series[rank, "of its own"].append(one.value / one.tokens)
                series[rank, "of all"].append(one.value / numbers.tokens)
    for values in series.values():
        ordered = sorted(values)
        others = 1 + sum(other > one * (1 + rounding) for one, other in pairwise(ordered))
        if others < 2 or (rounding == EXACT and (others < LEAST_STEPS or 2 * others <= len(ordered))):
            return False
    return True


def _explained(divided: Sequence[tuple[StepVerdict, OwnDivisors]], named: Sequence[bool]) -> bool | None:
    """Whether one way to count makes nearly all divisors, or those of most steps have a name; None where they are
    rounded too far to tell."""
    if 2 * sum(named) >= len(named):
        return True
    counts = {one.num_tokens or 0 for verdict, _ in divided for one in verdict.contributions.by_key.values()}
    hits: dict[float, list[bool]] = defaultdict(list)
    vague = 0
    for (verdict, numbers), name in zip(divided, named, strict=True):
        for one in numbers.all:
            if name or numbers.counted:
                hits[0.0].append(True)
            elif one.value * numbers.rounding > VAGUE:
                vague += 1
            else:
                for multiple, hit in _counts(one, numbers.rounding, verdict.context, counts).items():
                    hits[multiple].append(hit)
    everywhere = hits.pop(0.0, [])
    tested = max(map(len, hits.values()), default=0) + len(everywhere)
    if vague > tested:
        return None
    misses = min((len(found) - sum(found) for found in hits.values()), default=0)
    return misses <= FEW * tested


def _counts(divisor: Divisor, rounding: float, context: StepContext, counts: Iterable[int]) -> dict[float, bool]:
    """Whether a divisor times one degree, or two, is a count, or the tokens that it divides times a count over
    another, or over one of too many: by what it is multiplied by."""
    degrees = {value for name, value in context.quantities.items() if name != "num_tokens" and value > 1}
    multiples = {1.0, *degrees, *(one * other for one, other in combinations(sorted(degrees), 2))}
    ratios = {one: [divisor.value * one * count / divisor.tokens for count in counts if count] for one in multiples}
    sought = 2 * sum(ratio * rounding for found in ratios.values() for ratio in found) <= SURE
    return {
        one: _whole(divisor.value * one, max(NEAR, divisor.value * one * rounding))
        or (sought and any(_whole(ratio, ratio * rounding) for ratio in ratios[one]))
        for one in multiples
    }


def _whole(number: float, tolerance: float) -> bool:
    return abs(number - round(number)) <= tolerance

"""Summands of a loss, beside one that counts tokens, whose coefficient is another on other ranks or in other passes.

A term that nobody declared has a coefficient that is not recorded, so its number accuses nobody. But it is one number:
what a program multiplies a term by may follow counts (of tokens, of passes), the data, or a schedule, and each of these
is another from step to step. What follows the rank or the accumulation step in every recorded step alike, and no count,
is either a source's own coefficient or a term that is lost, or weighed twice, in some of the passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from gradcheck_dist.diagnosis.losses.terms_beside import SAME, behind_roots
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import Event, LossTerm, Site
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions
from gradcheck_dist.ledger.solve import EPSILON

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

APART = 0.01
"""Coefficients that somebody wrote lie further apart, relative."""
MIN_STEPS = 2
MAX_PASSES = 512
"""A step with more is not looked at."""
NO_COUNT_TELLS = "no count of tokens or passes tells why"

Weights = Mapping[ContributionKey, float]


class Name(NamedTuple):
    """What tells a term of one step from the others, and makes it the same in the next."""

    ordinal: int
    op: str
    file: str
    line: int | None


@dataclass(frozen=True)
class TermWeights:
    """What one term weighs in a step's passes, behind their roots, 0 where a pass has no term; and what these count.
    `tolerance` is relative to the largest weight."""

    name: Name
    site: Site | None
    weights: Weights
    tokens: Weights
    labels: Weights
    tolerance: float


def term_weights(
    contributions: Contributions, events: Mapping[int, Sequence[Event]], held: Sequence[Held]
) -> Iterator[TermWeights]:
    """The terms of a step, but for those in whose place others stand in some of its passes."""
    by_key, behind = contributions.by_key, behind_roots(held)
    if not by_key.keys() <= behind.keys() or not contributions.num_tokens or len(by_key) > MAX_PASSES:
        return
    terms: dict[Name, dict[ContributionKey, LossTerm]] = defaultdict(dict)
    bare = set(by_key)
    for key, one in by_key.items():
        for event in events.get(one.loss_rank, ()) if one.loss_rank is not None else ():
            if isinstance(event, LossTerm) and (event.accumulation_step, event.microbatch) == key[1:]:
                file, line = (event.site.file, event.site.line) if event.site is not None else ("", None)
                terms[Name(event.ordinal, event.op, file, line)][key] = event
                bare.discard(key)
    tokens = {key: float(one.num_tokens or 0) for key, one in by_key.items()}
    labels = {key: _num_labels(one) or tokens[key] for key, one in by_key.items()}
    for name, of_term in terms.items():
        weights = {key: of_term[key].weight * behind[key] if key in of_term else 0.0 for key in by_key}
        if of_term.keys() | bare == by_key.keys() and any(weights.values()) and all(tokens.values()):
            site = next(iter(of_term.values())).site
            yield TermWeights(name, site, weights, tokens, labels, max(map(_tolerance, by_key.values())))


def leave_terms_open(verdicts: Sequence[StepVerdict]) -> None:
    """Leave steps open in which a term weighs apart what no count tells apart."""
    found: dict[Name, list[tuple[StepVerdict, TermWeights]]] = defaultdict(list)
    for verdict in verdicts:
        for one in verdict.term_weights if not verdict.context.relative else ():
            found[one.name].append((verdict, one))
    for name, of_steps in found.items():
        steps = [one for _, one in of_steps]
        if len(steps) < MIN_STEPS or not (follows := _follows(steps)):
            continue
        levels = dict.fromkeys(f"{value:.4g}" for value in sorted(_pattern(steps[0].weights).values()))
        where = f" ({site.short})" if (site := steps[0].site) is not None else ""
        for verdict, _ in of_steps:
            verdict.reasons.append(
                f"a term of the loss ({name.op}) beside one that counts tokens{where} weighs {', '.join(levels)} of "
                f"its largest weight in passes of one step: it follows the {follows} in every step alike, and "
                f"{NO_COUNT_TELLS}"
            )


def _follows(steps: Sequence[TermWeights]) -> str:
    """What a term's weight depends on in all of these steps alike; "" where it is one number, where it is another
    pattern in some step, or where counts tell it."""
    patterns = [_pattern(step.weights) for step in steps]
    allowed = max(step.tolerance for step in steps)
    first = patterns[0]
    if max(first.values()) - min(first.values()) <= max(APART, allowed) or _is_once(first):
        return ""
    alike = all(
        pattern.keys() == first.keys() and all(abs(pattern[key] - first[key]) <= allowed for key in first)
        for pattern in patterns
    )
    if not alike or _tell_counts(steps, allowed):
        return ""
    if _is_function(first, lambda key: key[0], allowed):
        return "rank"
    return "accumulation step" if _is_function(first, lambda key: key[1:], allowed) else "rank and accumulation step"


def _pattern(weights: Weights) -> Weights:
    """Weights relative to the largest."""
    largest = max(weights.values(), key=abs)
    return {key: weight / largest for key, weight in weights.items()}


def _is_once(pattern: Weights) -> bool:
    """Whether each rank has the term once in a step, and all have the same: it stands outside of the accumulation."""
    there = [key for key, value in pattern.items() if value]
    ranks = {key[0] for key in pattern}
    return len(there) == len(ranks) == len({key[0] for key in there}) and _is_one([pattern[key] for key in there], SAME)


def _is_function(pattern: Weights, part: Callable[[ContributionKey], object], allowed: float) -> bool:
    groups: dict[object, list[float]] = defaultdict(list)
    for key, value in pattern.items():
        groups[part(key)].append(value)
    return all(max(values) - min(values) <= allowed for values in groups.values())


def _tell_counts(steps: Sequence[TermWeights], allowed: float) -> bool:
    """Whether a count, its inverse, or a product of two such, makes the weights of every step."""
    counts = [_counts(step) for step in steps]
    singles = [(name, power) for name in counts[0] for power in (1, -1)]
    for chosen in (*((one,) for one in singles), *combinations_with_replacement(singles, 2)):
        freed = []
        for step, of_step in zip(steps, counts, strict=True):
            values = dict(step.weights)
            for (name, power), key in product(chosen, values):
                values[key] /= of_step[name][key] ** power
            freed.append(list(values.values()))
        if all(_is_one(values, allowed) for values in freed):
            return True
    return False


def _counts(step: TermWeights) -> dict[str, Weights]:
    """What a pass's weight may be made of: its tokens and labels, those of its rank and of its accumulation step, and
    how many passes these have."""
    found: dict[str, Weights] = {"tokens": step.tokens, "labels": step.labels}
    for name, of in (*found.items(), ("passes", dict.fromkeys(step.tokens, 1.0))):
        for where, place in (("rank", 0), ("accumulation step", 1)):
            sums: dict[int, float] = defaultdict(float)
            for key, value in of.items():
                sums[key[place]] += value
            found[f"{name} of a {where}"] = {key: sums[key[place]] for key in of}
    return found


def _is_one(values: Sequence[float], allowed: float) -> bool:
    middle = median(values)
    return bool(middle) and all(abs(value / middle - 1) <= allowed for value in values)


def _num_labels(one: Contribution) -> float:
    return float(one.loss.num_labels or 0) if one.loss is not None else 0.0


def _tolerance(one: Contribution) -> float:
    return max(SAME, 4 * EPSILON.get(one.loss.dtype, 0.0)) if one.loss is not None else SAME

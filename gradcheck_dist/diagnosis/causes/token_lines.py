"""Means over the tokens of each rank, and a line of the trainer's (or a communication hook) that multiplies gradients
by these tokens again: losses and that line have one aim together. Where the line counts others, it is the line that is
wrong, and not losses that leave the rest of the normalisation to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, prod
from statistics import median

from gradcheck_dist.diagnosis.causes.account import Account, Gap
from gradcheck_dist.diagnosis.causes.hands import Judged
from gradcheck_dist.diagnosis.causes.places import kind_of, line_of
from gradcheck_dist.diagnosis.causes.reweighed import Start, by_place
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.weights.cells import SIGMAS
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions

EXACT = 1e-5
"""Relative: the least that factors are known to."""
CHANCE = 1e-2
"""Of numbers that are no counts, fewer than one of a hundred come so near to such whole numbers."""
MOST_COUNTED = 10_000
Measured = tuple[float, float]
"""A relative tolerance, and a factor."""


@dataclass(frozen=True)
class TokenLine:
    """The place behind which gradients are multiplied by counts, and the tokens of each contribution's rank."""

    place: Start | None
    tokens: Mapping[ContributionKey, int]


def token_line(every: Sequence[Judged], contributions: Contributions) -> TokenLine | None:
    """The one place behind which most of each rank's gradients are multiplied by its tokens, or by other whole numbers
    in their place, where the losses of all ranks come to as much; None where there is none."""
    tokens = _of_ranks(contributions)
    there = [one for one in every if not one.gone and one.account.arrived]
    if tokens is None or not there or any(one.cell.key not in tokens for one in every):
        return None
    changes = [by_place(one.account.gaps) for one in there]
    for place in dict.fromkeys(place for gaps in changes for place in gaps):
        of_rank: dict[int, list[Measured]] = defaultdict(list)
        for one, gaps in zip(there, changes, strict=True):
            of_rank[one.cell.key[0]].append((_noise(gaps.get(place, ())), _behind(one, gaps.get(place, ()), place)))
        usual = {rank: _usual(found) for rank, found in of_rank.items()}
        known = {rank: one for rank, one in usual.items() if one is not None}
        if len(known) == len(set(contributions.coordinate.values())) and _counts(known, contributions):
            return TokenLine(place, tokens)
    return None


def lay_tokens_to_losses(every: Sequence[Judged], contributions: Contributions, line: TokenLine) -> None:
    """Move the tokens by which the line should multiply from what nobody recorded to the losses."""
    total = sum(one.num_tokens or 0 for one in contributions.by_key.values())
    ranks = len({key[0] for key in line.tokens})
    gaps_of = [by_place(one.account.gaps).get(line.place, []) for one in every]
    left = [_behind(one, gaps, line.place) / line.tokens[one.cell.key]
            for one, gaps in zip(every, gaps_of, strict=True)]  # fmt: skip
    middle = median(map(abs, left))
    # The line may divide by all tokens, too, and make up for an average or be one.
    scales = {1.0, 1 / total, ranks / total, *(taken for one in every if (taken := _taken(one, line.place)) > 0)}
    scale = min(scales, key=lambda scale: abs(log(scale) - log(middle or 1.0)))
    for one, gaps, besides in zip(every, gaps_of, left, strict=True):
        old, rest = one.account, list(one.account.gaps)
        if gaps:
            loudest = max(gaps, key=lambda gap: abs(gap.factor - 1))
            rest = [gap for gap in rest if gap is loudest or all(gap is not other for other in gaps)]
            rest = [replace(gap, factor=besides / scale) if gap is loudest else gap for gap in rest]
        root = old.root * line.tokens[one.cell.key] * scale / (_taken(one, line.place) or 1.0)
        one.account = Account(root, old.steps, rest, old.arrived, old.leaf, old.by_hand)


def _noise(gaps: Sequence[Gap]) -> float:
    return max(EXACT, SIGMAS * sum(gap.noise for gap in gaps))


def _usual(found: Sequence[Measured]) -> Measured | None:
    """What most factors are, as the best known of them is."""
    middle = median(factor for _, factor in found)
    alike = [one for one in found if middle > 0 and abs(one[1] / middle - 1) <= one[0] + EXACT]
    return min(alike) if 2 * len(alike) > len(found) else None


def _taken(one: Judged, place: Start | None) -> float:
    """What the record at a place says that it does."""
    here = (step.factor for step in one.account.steps if (kind_of(step.event), line_of(step.event)) == place)
    return prod(here)


def _behind(one: Judged, gaps: Sequence[Gap], place: Start | None) -> float:
    """What is done to a weight behind a place, and by what is recorded there: an average that a communication hook does
    not do is in either."""
    return prod(gap.factor for gap in gaps) * _taken(one, place)


def _of_ranks(contributions: Contributions) -> dict[ContributionKey, int] | None:
    """The tokens of each contribution's rank, where the losses of all ranks come to as much; None elsewhere."""
    counts: dict[int, int] = defaultdict(int)
    weights: dict[int, float] = defaultdict(float)
    for key, one in contributions.by_key.items():
        if one.num_tokens is None or one.weight is None or not one.weight > 0:
            return None
        counts[key[0]] += one.num_tokens
        weights[key[0]] += one.num_tokens * one.weight
    if len(counts) < 2 or min(counts.values()) <= 0:
        return None
    if all(abs((one.weight or 0.0) - 1) <= EXACT for one in contributions.by_key.values()):
        return None  # bare sums, which come to as much where ranks have as many tokens
    if max(weights.values()) > min(weights.values()) * (1 + SAME):
        return None
    return {key: counts[key[0]] for key in contributions.by_key}


def _counts(factors: Mapping[int, Measured], contributions: Contributions) -> bool:
    """Whether the factors of ranks, each with its tolerance, are their tokens or those of one of their passes, if they
    differ also times one number, or whole numbers that are none by chance."""
    noise = 2 * max(tolerance for tolerance, _ in factors.values())
    values = [factor for _, factor in factors.values()]
    differ = not _one_number(values, noise)
    tallies: dict[tuple[int, int] | None, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for key, one in contributions.by_key.items():
        tallies[None][key[0]] += one.num_tokens or 0
        tallies[key[1:]][key[0]] += one.num_tokens or 0
    for tally in tallies.values():
        counts = [tally[rank] for rank in factors]
        if not all(counts):
            continue
        times = [value / count for value, count in zip(values, counts, strict=True)]
        if _one_number(times, noise) and (differ or (_one_number([1.0, *times], noise) and min(counts) > 1)):
            return True
    return differ and min(values) > 1 + noise and _whole(values, noise)


def _one_number(values: Sequence[float], noise: float) -> bool:
    return max(values) <= min(values) * (1 + noise)


def _whole(values: Iterable[float], noise: float) -> bool:
    chance = 1.0
    for value in values:
        if value > MOST_COUNTED or abs(value - round(value)) > noise * value:
            return False
        chance *= min(2 * noise * value, 1.0)
    return chance <= CHANCE

"""Means over the tokens of each rank, and a line of the trainer's (or a communication hook) that multiplies gradients
by these tokens again: losses and that line have one aim together. Where the line counts others, it is the line that is
wrong, and not losses that leave the rest of the normalisation to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, prod

from gradcheck_dist.diagnosis.causes.account import Account, Gap
from gradcheck_dist.diagnosis.causes.hands import Judged
from gradcheck_dist.diagnosis.causes.reweighed import Start, by_place
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.weights.cells import SIGMAS
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions

EXACT = 1e-5
"""Relative: the least that factors are known to."""
CHANCE = 1e-2
"""Of numbers that are no counts, fewer than one of a hundred come so near to such whole numbers."""
MOST_COUNTED = 10_000


@dataclass(frozen=True)
class TokenLine:
    """The place behind which gradients are multiplied by counts, and the tokens of each contribution's rank."""

    place: Start | None
    tokens: Mapping[ContributionKey, int]


def token_line(every: Sequence[Judged], contributions: Contributions) -> TokenLine | None:
    """The one place behind which each rank's gradients are multiplied by its tokens, or by other whole numbers in their
    place, where the losses of all ranks come to as much; None where there is none."""
    tokens = _of_ranks(contributions)
    if tokens is None or not every or any(one.cell.key not in tokens for one in every):
        return None
    changes = [by_place(one.account.gaps) for one in every]
    for place in changes[0]:
        if not all(place in gaps for gaps in changes):
            continue
        of_rank: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for one, gaps in zip(every, changes, strict=True):
            of_rank[one.cell.key[0]].append((_noise(gaps[place]), _behind(one, gaps[place])))
        best = {rank: min(found) for rank, found in of_rank.items()}
        alike = all(
            abs(factor / best[rank][1] - 1) <= tolerance + best[rank][0]
            for rank, found in of_rank.items()
            for tolerance, factor in found
            if best[rank][1] > 0
        )
        if alike and all(factor > 0 for _, factor in best.values()) and _counts(best, contributions):
            return TokenLine(place, tokens)
    return None


def lay_tokens_to_losses(every: Sequence[Judged], contributions: Contributions, line: TokenLine) -> None:
    """Move the tokens by which the line should multiply from what nobody recorded to the losses."""
    total = sum(one.num_tokens or 0 for one in contributions.by_key.values())
    gaps_of = [by_place(one.account.gaps)[line.place] for one in every]
    left = [_behind(one, gaps) / line.tokens[one.cell.key] for one, gaps in zip(every, gaps_of, strict=True)]
    middle = sum(map(log, left)) / len(left)
    # The line may divide by all tokens, too, and make up for what an average takes away.
    scales = {1.0, 1 / total, *(taken for one in every if (taken := _documented(one)) > 0)}
    scale = min(scales, key=lambda scale: abs(log(scale) - middle))
    for one, gaps, besides in zip(every, gaps_of, left, strict=True):
        old, loudest = one.account, max(gaps, key=lambda gap: abs(gap.factor - 1))
        rest = [gap for gap in old.gaps if gap is loudest or all(gap is not other for other in gaps)]
        rest = [replace(gap, factor=besides / scale) if gap is loudest else gap for gap in rest]
        root = old.root * line.tokens[one.cell.key] * scale / _documented(one)
        one.account = Account(root, old.steps, rest, old.arrived, old.leaf, old.by_hand)


def _noise(gaps: Sequence[Gap]) -> float:
    return max(EXACT, SIGMAS * sum(gap.noise for gap in gaps))


def _documented(one: Judged) -> float:
    return prod(step.factor for step in one.account.steps)


def _behind(one: Judged, gaps: Sequence[Gap]) -> float:
    """What is done to a weight at one place, and by what is documented: which of the two takes an average that a
    communication hook does not do is a matter of words."""
    return prod(gap.factor for gap in gaps) * _documented(one)


def _of_ranks(contributions: Contributions) -> dict[ContributionKey, int] | None:
    """The tokens of each contribution's rank, where the losses of all ranks come to as much; None elsewhere."""
    counts: dict[int, int] = defaultdict(int)
    weights: dict[int, float] = defaultdict(float)
    for key, one in contributions.by_key.items():
        if one.num_tokens is None or one.weight is None or not one.weight > 0:
            return None
        counts[key[0]] += one.num_tokens
        weights[key[0]] += one.num_tokens * one.weight
    if min(counts.values()) <= 0:
        return None
    if max(weights.values()) > min(weights.values()) * (1 + SAME):
        return None
    return {key: counts[key[0]] for key in contributions.by_key}


def _counts(factors: Mapping[int, tuple[float, float]], contributions: Contributions) -> bool:
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

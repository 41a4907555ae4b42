"""Losses whose own weights are not known, and ranks that weigh unlike behind them: by their shares of one mean.

A trainer whose ranks have batches of unequal size multiplies each rank's gradients by its part of all that the losses
go over. Where that comes out as one number times the share of each, or as weights that come to one, no line is to
blame.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from statistics import median

import numpy as np

from gradcheck_dist.diagnosis.losses.elements import SAME, Expect, Judge, counted_each
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.fractions import fraction_of
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions

EXACT = 1e-5
"""How near to one, relative, weights have to come that are shares."""
BY_COUNT = "Ranks or passes weigh by how much their losses go over."
BY_SUM = (
    "Ranks weigh unlike, and together as one mean does: right where these are their shares of what all losses go over."
)


@dataclass(frozen=True)
class Shares:
    """What each contribution's own gradient is multiplied by, and what is said of it."""

    expected: dict[ContributionKey, Fraction]
    words: str


def shares_of_mean(contributions: Contributions, measured: list[Held], judge: Judge, expect: Expect) -> Shares | None:
    """The shares by which ranks or passes weigh unlike; None where it is something else that does this."""
    by_count = _by_count(contributions, measured, judge, expect)
    if by_count:
        return Shares(by_count, BY_COUNT)
    by_sum = _by_sum(contributions, measured)
    return Shares(by_sum, BY_SUM) if by_sum else None


def _by_count(
    contributions: Contributions, measured: list[Held], judge: Judge, expect: Expect
) -> dict[ContributionKey, Fraction]:
    """All that the losses go over weighs alike, but for one number that all have in common, such as a coefficient."""
    for one in counted_each(contributions):
        if len(set(one.tokens.values())) < 2:
            continue
        due = expect("global-token-mean", one.tokens)
        cells = [cell for held in judge(measured, one.contributions, due) for cell in held.cells]
        common = median(cell.ratio for cell in cells) if cells else 0.0
        weights = {key: float(one.contributions.by_key[key].weight or 0.0) for key in due}
        alike = all(abs(cell.ratio - common) <= max(cell.margin, SAME * common) for cell in cells)
        if common > 0 and alike and all(weights.values()):
            return {key: fraction_of(common * float(share) / weights[key]) for key, share in due.items()}
    return {}


def _by_sum(contributions: Contributions, measured: list[Held]) -> dict[ContributionKey, Fraction]:
    """Every rank's weight is there, on all ranks the same, and those of one pass come to one."""
    seen: dict[ContributionKey, list[float]] = defaultdict(list)
    for key, value in _transfers(measured):
        if key in contributions.by_key:
            seen[key].append(value)
    weights = {key: median(values) for key, values in seen.items()}
    if weights.keys() != contributions.by_key.keys() or len(set(map(fraction_of, weights.values()))) < 2:
        return {}
    alike = all(abs(one - weights[key]) <= SAME * weights[key] for key, values in seen.items() for one in values)
    return {key: fraction_of(value) for key, value in weights.items()} if alike and _come_to_one(weights) else {}


def _transfers(measured: list[Held]) -> Iterator[tuple[ContributionKey, float]]:
    for held in measured:
        if held.observed is None:
            continue
        for column, key in enumerate(held.replay.basis.keys):
            value = float(held.observed[column])
            if held.visible[column] and np.isfinite(value):
                yield key, value


def _come_to_one(weights: Mapping[ContributionKey, float]) -> bool:
    of_pass: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for key, value in weights.items():
        of_pass[key[1:]].append(value)
    return all(len(ranks) > 1 and min(ranks) > 0 and abs(sum(ranks) - 1) <= EXACT for ranks in of_pass.values())

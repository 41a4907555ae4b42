"""Means that are weighed by counts of more tokens than enter them: (n_c + b_c) / n_c of N / (N + B), B the sum of b_c.

Labels that are counted before a shift have one more a sequence, which no loss takes. Where all passes count as many
more and hold as many tokens nothing shows; else the weights give each b_c, if they are whole numbers that fit them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, isfinite, prod

from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.solve import EPSILON

SURE = 0.001
"""Any weights would be fitted less often."""
FEW = 4
"""Of so many tokens one more was counted at most."""
SMALL = 12
"""Numbers below it that the counts are multiples of may be coefficients."""


def extra_counts(contributions: Contributions) -> dict[ContributionKey, int] | None:
    """How many tokens more than enter it each contribution was counted for, where the losses' weights tell it without
    doubt: one set of whole numbers fits, none of them below zero, and chance would hardly find any."""
    weights, tokens, rounding = {}, {}, 0.0
    for key, one in contributions.by_key.items():
        if not one.weight or not isfinite(one.weight) or not one.num_tokens or one.loss is None:
            return None
        weights[key], tokens[key] = one.weight, one.num_tokens
        rounding = max(rounding, 4 * EPSILON.get(one.loss.dtype, EPSILON["bfloat16"]))
    if len(weights) < 2 or min(weights.values()) <= 0:
        return None
    total = sum(tokens.values())
    share = {key: weights[key] * tokens[key] for key in weights}
    whole = sum(share.values())
    found, chance = [], 0.0
    for extra in range(1, total // FEW + 1):
        counts = {key: share[key] / whole * (total + extra) for key in share}
        widths = sorted(min(2 * count * rounding, 1.0) for count in counts.values())
        chance += prod(widths[1:])  # the last follows from the sum
        if chance > SURE:
            return None
        if (fit := _whole(counts, tokens, rounding)) is not None:
            found.append(fit)
    if len(found) != 1:
        return None
    counted = [tokens[key] + more for key, more in found[0].items()]
    return found[0] if max(counted) // gcd(*counted) >= SMALL else None


def _whole(
    counts: Mapping[ContributionKey, float], tokens: Mapping[ContributionKey, int], rounding: float
) -> dict[ContributionKey, int] | None:
    for key, count in counts.items():
        if abs(count - round(count)) > count * rounding or round(count) < tokens[key]:
            return None
    return {key: round(count) - tokens[key] for key, count in counts.items()}

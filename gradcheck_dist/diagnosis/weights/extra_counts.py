"""Means that are weighed by counts of more tokens than enter them: (n_c + b_c) / n_c of N / (N + B), B the sum of b_c.

Labels that are counted before a shift have one more a sequence, which no loss takes. Where all passes count as many
more and hold as many tokens nothing shows; else the weights give each b_c, if they are whole numbers that fit them all.
"""

from __future__ import annotations

from math import gcd, isfinite

import numpy as np

from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.solve import EPSILON

SURE = 0.001
"""Any weights would be fitted less often."""
FEW = 4
"""Of so many tokens one more was counted at most."""
SMALL = 12
"""Numbers below it that the counts are multiples of may be coefficients."""
CHUNK = 65536
"""So many totals are tried at once."""


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
    entered = np.array([float(tokens[key]) for key in weights])  # weighted tokens are fractions
    shares = np.array([weights[key] for key in weights]) * entered
    shares /= shares.sum()
    total = float(entered.sum())
    extras = range(1, int(total // FEW) + 1)
    if _chance(2 * rounding * shares, total, extras) > SURE:
        return None
    found: list[np.ndarray] = []
    for start in range(0, len(extras), CHUNK):
        found += _whole(shares, entered, rounding, total + np.array(extras[start : start + CHUNK]))
        if len(found) > 1:
            return None
    if not found or int(found[0].max()) // gcd(*found[0].tolist()) < SMALL:
        return None
    return {key: int(counted) - tokens[key] for key, counted in zip(weights, found[0], strict=True)}


def _chance(widths: np.ndarray, total: float, extras: range) -> float:
    """How many of these totals any weights would fit. `widths`, shape (num_contributions,): the parts of a whole number
    that rounding leaves to each, for a total of one token. Below SURE it may be told as 0."""
    widths = np.sort(widths)[1:]  # the last follows from the sum
    if len(extras) * np.minimum(widths * (total + len(extras)), 1.0).prod() <= SURE:
        return 0.0
    chance, rows = 0.0, max(CHUNK // len(widths), 1)
    for start in range(0, len(extras), rows):
        counted = total + np.array(extras[start : start + rows])
        chance += float(np.minimum(np.outer(counted, widths), 1.0).prod(axis=1).sum())
        if chance > SURE:
            break
    return chance


def _whole(shares: np.ndarray, tokens: np.ndarray, rounding: float, totals: np.ndarray) -> list[np.ndarray]:
    """The counts of those totals, shape (num_contributions,) each, that are whole numbers and none below `tokens`."""
    for share, least in zip(shares, tokens, strict=True):
        counts = share * totals
        whole = np.rint(counts)
        totals = totals[(np.abs(counts - whole) <= counts * rounding) & (whole >= least)]
        if not len(totals):
            break
    return [np.rint(shares * total).astype(int) for total in totals]

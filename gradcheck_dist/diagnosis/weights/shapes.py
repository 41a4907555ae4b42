"""Shapes that no known bug has, in words: one factor on a part of the matrix, or a power of a count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from gradcheck_dist.ledger.contributions import ContributionKey

POWERS = (-1.0, 1.0, -2.0, 2.0, -0.5, 0.5)
MIN_VALUES = 3
"""Fewer different counts fit some power by chance; two numbers of tokens do not, where ratios are known to PRECISE."""
PRECISE = 1e-4
TOKENS = ("n_c", "N_r", "N_k", "L_c", "T_c")


@dataclass(frozen=True)
class Place:
    """Where a cell stands: its contribution, the rank that holds it and that rank's data coordinate."""

    key: ContributionKey
    holder: int
    holder_data_rank: int


def where(wrong: Sequence[Place], every: Sequence[Place]) -> str:
    """The part of a matrix that is wrong, in words: as few coordinates as single it out, or how many cells it has."""
    own = [place.key[0] == place.holder_data_rank for place in every]
    if any(own) and not all(own):
        for is_own, words in ((True, "each rank's own contributions"), (False, "other ranks' contributions")):
            if {place for place, mine in zip(every, own, strict=True) if mine == is_own} == set(wrong):
                return words
    coordinates = {
        "data rank": [place.key[0] for place in every],
        "accumulation step": [place.key[1] for place in every],
        "microbatch": [place.key[2] for place in every],
        "holder rank": [place.holder for place in every],
    }
    chosen = set(wrong)
    parts, fits = [], [True] * len(every)
    for name, values in coordinates.items():
        taken = {value for value, place in zip(values, every, strict=True) if place in chosen}
        if taken != set(values):
            parts.append(_named(name, sorted(taken), max(values)))
            fits = [fit and value in taken for fit, value in zip(fits, values, strict=True)]
    if parts and all(fit == (place in chosen) for fit, place in zip(fits, every, strict=True)):
        return " and ".join(parts)
    return f"{len(chosen)} of {len(every)} weights"


def _named(name: str, values: list[int], last: int) -> str:
    shown = ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
    if values == [last] and last > 0 and name in ("accumulation step", "microbatch"):
        return f"the last {name} ({shown})"
    if values == [0] and last > 0 and name in ("accumulation step", "microbatch"):
        return f"the first {name} (0)"
    return f"{name}{'s' if len(values) > 1 else ''} {shown}"


def counts(
    keys: Sequence[ContributionKey],
    tokens: Mapping[ContributionKey, int],
    labels: Mapping[ContributionKey, int],
    tolerance: float,
    rows: Mapping[ContributionKey, int] | None = None,
) -> dict[str, list[float]]:
    """What a loss could be multiplied or divided by in a loop, by name, for each key; only what differs. `tolerance`:
    how well ratios are known; `rows`: into how many the labels are laid."""
    lengths = {
        key: labels.get(key, 0) / num for key, num in (rows or {}).items() if num and not labels.get(key, 0) % num
    }
    last = max(key[1] for key in keys)
    of_rank: dict[int, int] = {}
    of_step: dict[int, int] = {}
    for (rank, k, _), count in tokens.items():
        of_rank[rank] = of_rank.get(rank, 0) + count
        of_step[k] = of_step.get(k, 0) + count
    found: dict[str, list[float]] = {
        "n_c": [float(tokens.get(key, 0)) for key in keys],
        "N_r": [float(of_rank.get(key[0], 0)) for key in keys],
        "N_k": [float(of_step.get(key[1], 0)) for key in keys],
        "L_c": [float(labels.get(key, 0)) for key in keys],
        "T_c": [lengths.get(key, 0.0) for key in keys],
        "(k+1)": [key[1] + 1.0 for key in keys],
        "(K-k)": [last - key[1] + 1.0 for key in keys],
        "(m+1)": [key[2] + 1.0 for key in keys],
        "(r+1)": [key[0] + 1.0 for key in keys],
    }
    least = {name: 2 for name in TOKENS if tolerance <= PRECISE}
    return {
        name: values
        for name, values in found.items()
        if min(values) > 0 and len(set(values)) >= least.get(name, MIN_VALUES)
    }


def power_law(
    ratios: np.ndarray, tolerances: np.ndarray, quantities: Mapping[str, Sequence[float]]
) -> tuple[float, str, float] | None:
    """(factor, name, power) of ratio = factor * count^power, the simplest power first; None when none fits."""
    if np.any(ratios <= 0) or np.any(tolerances >= 0.25):
        return None
    for power in POWERS:
        for name, values in quantities.items():
            rest = np.log(ratios) - power * np.array([log(value) for value in values])
            middle = float(np.average(rest, weights=1.0 / np.maximum(tolerances, 1e-9) ** 2))
            if np.all(np.abs(rest - middle) <= 2 * tolerances):
                return float(np.exp(middle)), name, power
    return None


def num_constants(values: np.ndarray, tolerance: float) -> int:
    """How many constants it takes at least to describe values with a relative tolerance: a constant is within twice the
    tolerance of each of its values."""
    found, reach = 0, -np.inf
    for value in np.sort(np.log(values)):
        if value > reach:
            found, reach = found + 1, value + 4 * tolerance
    return found

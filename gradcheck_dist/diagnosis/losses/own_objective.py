"""What the losses of a step were out for, when that is not what is expected of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.weights.cells import Held, loss_rounding, material
from gradcheck_dist.diagnosis.weights.fractions import fraction_of
from gradcheck_dist.diagnosis.weights.partial_counts import partitions
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.expected import OBJECTIVES, expected_weights

USUAL = 1 / 3
"""The least share of losses that tells how much they all should weigh: of twenty that each have a number of their own,
two are alike in bfloat16 by chance."""


@dataclass(frozen=True)
class OwnObjective:
    """What losses were out for. `anchored`: their scale is known, and not only their total. `num_parts`: of so many
    parts of the step each is a mean over its own tokens; the weights are those of the mean of these means, unless the
    parts are never brought together."""

    weights: dict[ContributionKey, Fraction]
    anchored: bool = True
    num_parts: int = 1

    @property
    def apart(self) -> dict[ContributionKey, Fraction]:
        """The weights where nothing brings the parts together."""
        return {key: weight * self.num_parts for key, weight in self.weights.items()}


def own_objective(
    contributions: Contributions,
    target: Aim,
    right: Collection[ContributionKey] = (),
    times: Mapping[ContributionKey, int] | None = None,
) -> OwnObjective | None:
    """What the losses themselves were out for, when that is not (a multiple of) what is expected.

    None when the weights at the losses are proportional to the expected ones. Otherwise the weights of the objective
    that they are proportional to; failing that, the weights at the losses, so scaled that those of them are as
    expected that came out right in the end (`right`), or else those that most losses have, or else their total.

    Args:
        times: by what a line that has one aim with the losses multiplies their gradients.
    """
    tokens = target.tokens
    expected = {key: weight for key, weight in target.expected.items() if tokens.get(key)}
    roots = {key: contributions.by_key[key].weight for key in expected}
    if times is not None:
        roots = {key: root and root * times[key] for key, root in roots.items()}
    if not roots or any(not root for root in roots.values()):
        return None
    measured = np.array([roots[key] for key in expected], dtype=float)
    rounding = loss_rounding(contributions)
    near = np.array([max(rounding / 2, material(tokens[key])) for key in expected])
    if _proportional(measured, np.array([float(weight) for weight in expected.values()]), near):
        return None
    for name in OBJECTIVES:
        other = expected_weights(name, tokens)
        if _proportional(measured, np.array([float(other[key]) for key in expected]), near):
            return OwnObjective(target.filled(other))
    for way in partitions(list(expected), contributions.groups, contributions.coordinate.values()):
        counted = way.tokens_of({key: tokens[key] for key in expected})
        if _proportional(measured, np.array([1.0 / counted[key] for key in expected]), near):
            means = {key: Fraction(1, way.num_parts * count) for key, count in counted.items()}
            return OwnObjective(target.filled(means), num_parts=way.num_parts)
    quotients = {key: (roots[key] or 0.0) / float(expected[key]) for key in expected}
    scale = _usual(quotients, right, rounding)
    anchored = scale is not None
    if scale is None:
        scale = sum(float(expected[key]) * tokens[key] for key in expected) / sum(
            (roots[key] or 0.0) * tokens[key] for key in expected
        )
    weights = {key: fraction_of((roots[key] or 0.0) * scale, 10**12) for key in expected}
    return OwnObjective(target.filled(weights), anchored)


def own_division(
    held: Iterable[Held], contributions: Contributions, expected: Mapping[ContributionKey, Fraction]
) -> dict[ContributionKey, Fraction] | None:
    """The weights where what follows the losses divides by all tokens, as it should behind sums, and the losses divide
    too: each weight is off by just what its loss enters backward with. None elsewhere."""
    roots = {key: contributions.by_key[key].weight or 0.0 for key in expected}
    cells = [cell for one in held for cell in one.cells]
    if not cells or any(abs(cell.ratio - roots[cell.key]) > 2 * cell.margin for cell in cells):
        return None
    if any(2 * cell.margin >= abs(roots[cell.key]) for cell in cells):
        return None  # noise would hide any other division
    return {key: weight * fraction_of(roots[key], 10**12) for key, weight in expected.items()}


def _usual(
    quotients: Mapping[ContributionKey, float], right: Collection[ContributionKey], rounding: float
) -> float | None:
    """What brings the level that stands for right ones to 1; None when no level stands out."""
    levels: list[list[ContributionKey]] = []
    for key in sorted(quotients, key=lambda key: quotients[key]):
        known = levels[-1] if levels else []
        if known and abs(quotients[key] / quotients[known[0]] - 1) <= rounding:
            known.append(key)
        else:
            levels.append([key])
    for chosen in (set(right), set(quotients)):
        counts = sorted(((len(chosen.intersection(level)), index) for index, level in enumerate(levels)), reverse=True)
        most, more = counts[0][0], counts[1][0] if len(counts) > 1 else 0
        if most > more and most >= USUAL * len(chosen):
            return 1.0 / float(np.median([quotients[key] for key in levels[counts[0][1]]]))
    return None


def _proportional(first: np.ndarray, second: np.ndarray, near: np.ndarray) -> bool:
    """Equal up to a factor, each within what rounding or a safeguard puts it off (relative)."""
    quotient = first / second
    size = np.abs(quotient)
    low, high = quotient - near * size, quotient + near * size
    return bool(low.max() <= high.min())

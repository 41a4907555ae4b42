"""What is too quiet to be seen in any single weight, and loud in all of them together."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import SIGMAS, Cell, Held
from gradcheck_dist.ledger.contributions import ContributionKey


def losses_show(
    held: list[Held],
    own: dict[ContributionKey, Fraction] | None,
    expected: dict[ContributionKey, Fraction],
    rounding: float = 0.0,
) -> bool:
    """Whether the gradients follow what the losses were out for and not what is expected, although each weight alone is
    right within its noise.

    The losses' weights are known without noise but for `rounding`, that of their dtype (relative), so there is one
    number to measure: how much of their departure from the expected weights came through. It is told from 0 by SIGMAS
    standard errors, and not from 1 by these and what rounding makes of it.
    """
    if own is None:
        return False
    share, error, blurred = _came_through(held, own, expected, rounding)
    return abs(share) > SIGMAS * error and abs(share - 1) <= SIGMAS * error + blurred


def _came_through(
    held: list[Held],
    own: dict[ContributionKey, Fraction],
    expected: dict[ContributionKey, Fraction],
    rounding: float,
) -> tuple[float, float, float]:
    """The share, its standard error, and how far rounding at the losses may put it off."""
    best: dict[ContributionKey, Cell] = {}
    for one in held:  # copies of a gradient on several ranks share their rounding: the best one stands for all
        for cell in one.cells:
            if cell.key not in best or cell.stderr < best[cell.key].stderr:
                best[cell.key] = cell
    departure = np.array([float(own[key] / expected[key]) - 1 for key in best])
    off = np.array([cell.ratio - 1 for cell in best.values()])
    precision = np.array([1 / max(cell.stderr * max(abs(cell.ratio), 1.0), 1e-9) ** 2 for cell in best.values()])
    weight = float((departure**2 * precision).sum())
    if weight == 0:
        return 0.0, float("inf"), 0.0
    blurred = rounding * float((np.abs(departure) * precision).sum()) / weight
    return float((departure * off * precision).sum()) / weight, weight**-0.5, blurred

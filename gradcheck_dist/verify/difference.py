"""Central differences with an error estimate, and what may be concluded from them.

f'(0) along a direction from (f(h) - f(-h)) / 2h, error O(h**2), at three steps a factor 4 apart; Richardson's
extrapolation (16 D(h/4) - D(h)) / 15 takes the h**2 term away (Ridders, Adv. Eng. Software 4, 1982). The error is what
two extrapolations differ by, plus what rounding of f does to the smallest step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import Literal

RATIO = 4.0
ROUNDING = 8.0
"""Rounding errors of f in units of epsilon times the root of the sum of its squared summands."""

AGREE = 1e-3
"""Relative deviation that is none: autograd's own rounding, and approximations by documented formulas."""

ACCUSE = 1e-2
"""Below this relative deviation nothing is accused: approximate backward formulas (GELU) stay below it."""

PRECISE = 5e-2
"""An error estimate above this share of the derivative decides nothing."""

NOTHING = 1e-3
"""A derivative below this share of the function's own size, in noise of the same size, is called zero."""

BESIDE = 0.1
"""How far beside a point, relative to a variable's size: beyond all but the largest steps of single precision."""

Outcome = Literal["right", "wrong", "undetermined", "zero"]


@dataclass(frozen=True)
class Derivative:
    """A directional derivative by central differences and its error, in the unit of f; `rounding` is the part of the
    error that comes of the arithmetic, the rest of what steps of different size differ by. `kinked`: the derivatives to
    both sides differ."""

    value: float
    error: float
    rounding: float = 0.0
    kinked: bool = False


def steps(epsilon: float) -> tuple[float, float, float]:
    """Relative step sizes for arithmetic of this machine epsilon, largest first."""
    middle = epsilon**0.25
    return middle * RATIO, middle, middle / RATIO


def differentiate(
    function: Callable[[float], float],
    sizes: Sequence[float],
    epsilon: float,
    magnitude: float,
    jitter: float,
    center: float | None = None,
) -> Derivative:
    """d/dt function(t) at 0. Where smaller steps differ by more than larger ones they do not converge: the error is
    infinite.

    Args:
        function: of a relative step; evaluated six times, at the three `sizes` and their negatives.
        epsilon: the coarsest machine epsilon inside of it.
        magnitude: root of the sum of its squared summands, what rounding is proportional to.
        jitter: by how much two evaluations at the same point differ.
        center: function(0), which tells whether the derivatives to both sides are one; None: nobody asks.
    """
    ends = [(function(size), function(-size)) for size in sizes]
    large, middle, small = ((ahead - behind) / (2 * size) for (ahead, behind), size in zip(ends, sizes, strict=True))
    coarse, fine = _extrapolate(large, middle, 2), _extrapolate(middle, small, 2)
    rounding = (ROUNDING * epsilon * magnitude + jitter) / sizes[-1]
    error = abs(fine - coarse) + rounding
    if abs(small - middle) > max(abs(middle - large), PRECISE * abs(small), 2 * rounding):
        error = inf
    kinked = False
    if center is not None:
        turns = [(ahead + behind - 2 * center) / size for (ahead, behind), size in zip(ends, sizes, strict=True)]
        wide, turn = (_extrapolate(*pair, 1) for pair in pairwise(turns))
        kinked = abs(turn) > 5 * (abs(turn - wide) + 4 * rounding)
    return Derivative(fine, error, rounding, kinked)


def _extrapolate(at_h: float, at_h_over_4: float, order: int) -> float:
    """Without the error of this order in the step."""
    return (RATIO**order * at_h_over_4 - at_h) / (RATIO**order - 1)


def confirmed(coarse: Derivative, fine: Derivative | None = None) -> Derivative:
    """The better of two derivatives: with the steps that the coarsest result inside asks for, and with the finest.

    A coarse result may lie beside the way (a dropout mask), or on it: then small steps fall below its rounding and miss
    what goes through it. So the fine one counts where large steps say the same.
    """
    if fine is None or fine.error >= coarse.error:
        return coarse
    scale = max(abs(fine.value), abs(coarse.value))
    return fine if abs(fine.value - coarse.value) <= ACCUSE * scale else coarse


def judge(analytic: float, numeric: Derivative, natural: float, magnitude: float, agree: float) -> Outcome:
    """Whether a projected gradient is the derivative.

    Args:
        analytic: what autograd gives along the direction.
        numeric: what the differences give.
        natural: root of the sum of the squared summands of `analytic`, what a random direction gives without luck.
        magnitude: root of the sum of the function's squared summands.
        agree: relative rounding error of the analytic gradient.
    """
    if not (isfinite(analytic) and isfinite(numeric.value) and isfinite(numeric.error)):
        return "undetermined"
    scale = max(abs(analytic), abs(numeric.value), natural)
    deviation = abs(analytic - numeric.value)
    if scale <= 5 * numeric.error:  # a vanishing gradient, or nothing that can be seen at this precision
        return "zero" if numeric.error <= NOTHING * magnitude or scale == 0.0 else "undetermined"
    if deviation > 5 * numeric.error + max(ACCUSE, 3 * agree) * scale:
        return "wrong"
    if numeric.error > PRECISE * scale:
        return "undetermined"
    return "right" if deviation <= 5 * numeric.error + max(AGREE, 3 * agree) * scale else "undetermined"

"""The ratio of two curves: aligned, averaged with a band, and asked whether it stands or drifts.

Everything is done on logarithms: a factor is a shift there, and 1/4 lies as far from 1 as 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

OUTLIER_MADS = 8.0
MIN_OUTLIER = 1e-3
"""Nearer to the median than this, as a logarithm, no point is taken for an outlier."""
DRIFT_SIGMAS = 4.0
MIN_DRIFT = 0.03
"""A change of the ratio over the whole run that matters, as a logarithm: 3 %."""
MIN_DRIFT_POINTS = 8
START_POINTS = 5


@dataclass(frozen=True)
class Aligned:
    """Two curves at the same places, positive values only; `at` holds steps or tokens."""

    at: np.ndarray
    control: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Ratio:
    """test / control. `half` is the relative half width of the 95 % band, `drift` the relative change over the run.

    `start` and `start_half` are the same of the first points only, where both runs still have nearly the same
    parameters.
    """

    value: float
    half: float
    num_points: int
    num_outliers: int
    drift: float
    drift_half: float
    start: float
    start_half: float

    @property
    def is_drifting(self) -> bool:
        significant = abs(math.log1p(self.drift)) > math.log1p(self.drift_half)
        return significant and abs(math.log1p(self.drift)) > MIN_DRIFT


def align(control: dict[int, float], test: dict[int, float]) -> Aligned:
    """Both curves at their common steps."""
    steps = sorted(step for step in control.keys() & test.keys() if control[step] > 0 and test[step] > 0)
    return Aligned(
        np.array(steps, dtype=float),
        np.array([control[step] for step in steps]),
        np.array([test[step] for step in steps]),
    )


def align_by_tokens(
    control: dict[int, float], control_seen: dict[int, float], test: dict[int, float], test_seen: dict[int, float]
) -> Aligned:
    """The test curve, interpolated to where the control had seen as many tokens."""
    left, right = _by_tokens(control, control_seen), _by_tokens(test, test_seen)
    if len(left[0]) < 1 or len(right[0]) < 1:
        return Aligned(np.empty(0), np.empty(0), np.empty(0))
    inside = (left[0] >= right[0][0]) & (left[0] <= right[0][-1])
    at = left[0][inside]
    return Aligned(at, left[1][inside], np.exp(np.interp(at, right[0], np.log(right[1]))))


def seen_tokens(curve: dict[int, float]) -> dict[int, float]:
    """Tokens seen so far by step. A curve that only rises, and far, counts them already; else it is summed."""
    steps = sorted(curve)
    values = np.array([curve[step] for step in steps])
    rising = len(values) > 2 and bool((np.diff(values) > 0).all()) and values[-1] > 1.5 * values[0]
    total = values if rising else np.cumsum(values)
    return dict(zip(steps, total.tolist(), strict=True))


def _by_tokens(curve: dict[int, float], seen: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    steps = sorted(step for step in curve.keys() & seen.keys() if curve[step] > 0)
    return np.array([seen[step] for step in steps]), np.array([curve[step] for step in steps])


def ratio(aligned: Aligned) -> Ratio | None:
    """The ratio of two aligned curves, None with fewer than 2 common points."""
    logs = np.log(aligned.test / aligned.control)
    kept = _without_outliers(logs)
    values, at = logs[kept], aligned.at[kept]
    count = len(values)
    if count < 2:
        return None
    place = (at - at.mean()) / max(float(np.ptp(at)), 1e-300)
    # A line through few points follows their noise: with those nothing is said about a drift.
    slope = float((place * values).sum() / max((place**2).sum(), 1e-300)) if count >= MIN_DRIFT_POINTS else 0.0
    residual = values - values.mean() - slope * place
    effective = _effective(residual)
    spread = float(residual.std(ddof=min(2, count - 1)))
    spread = max(spread, 1e-7)  # logs are written with 7 digits or fewer
    t = student_t(effective - 1)
    slope_error = spread / math.sqrt(max(float((place**2).mean()), 1e-300) * effective)
    first = values[: max(1, min(START_POINTS, count // 2))]
    return Ratio(
        value=math.exp(float(values.mean())),
        half=math.expm1(t * spread / math.sqrt(effective)),
        num_points=count,
        num_outliers=len(logs) - count,
        drift=math.expm1(slope),
        drift_half=math.expm1(min(700.0, DRIFT_SIGMAS * slope_error)),
        start=math.exp(float(first.mean())),
        start_half=math.expm1(2.0 * spread / math.sqrt(len(first))),
    )


def _without_outliers(logs: np.ndarray) -> np.ndarray:
    """Spikes of single steps would carry the mean with them. Judged beside the trend."""
    count = len(logs)
    if count < MIN_DRIFT_POINTS:
        return np.ones(count, dtype=bool)
    third = count // 3
    rise = float(np.median(logs[-third:]) - np.median(logs[:third])) / (count - third)
    flat = logs - rise * np.arange(count)
    distance = np.abs(flat - np.median(flat))
    return np.asarray(distance <= max(OUTLIER_MADS * 1.4826 * float(np.median(distance)), MIN_OUTLIER))


def _effective(residual: np.ndarray) -> float:
    """How many independent points a series of neighbours that resemble each other is worth (first-order model)."""
    count = len(residual)
    power = float((residual**2).sum())
    if count < 4 or power == 0:
        return float(max(2, count))
    correlation = float((residual[1:] * residual[:-1]).sum()) / power
    correlation = min(max(correlation, 0.0), 0.999)
    return max(2.0, count * (1 - correlation) / (1 + correlation))


def student_t(freedom: float) -> float:
    """The two-sided 95 % point of Student's t, by the expansion about the normal distribution (Hill 1970)."""
    if freedom < 1.5:
        return 12.7
    if freedom < 2.5:
        return 4.3
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3

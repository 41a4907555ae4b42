"""The arithmetic of the numerical gradient check: errors are estimated, and nothing uncertain is accused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from gradcheck_dist.verify.difference import Derivative, confirmed, differentiate, judge, steps

FINE, SINGLE = 2.0**-52, 2.0**-23


def slope(function: Callable[[float], float], epsilon: float = FINE, magnitude: float = 1.0) -> Derivative:
    return differentiate(function, steps(epsilon), epsilon, magnitude, 0.0)


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (math.sin, 1.0),
        (math.exp, 1.0),
        (lambda t: (1 + t) ** 3, 3.0),
        (lambda t: math.tanh(0.5 + t), 0.7864477329659274),
    ],
)
def test_smooth_functions_in_both_precisions(function: Callable[[float], float], exact: float) -> None:
    fine = slope(function)
    assert abs(fine.value - exact) <= fine.error < 1e-9
    coarse = slope(lambda t: float(np.float32(function(t))), SINGLE)
    assert abs(coarse.value - exact) <= coarse.error < 1e-3


def test_a_kink_next_to_the_point_shows_in_the_error() -> None:
    kinked = slope(lambda t: max(0.0, t + 1e-4) * 3.0)
    assert kinked.error > 0.05


def test_a_kink_at_the_point_is_told_from_a_curve() -> None:
    def kinked(function: Callable[[float], float], epsilon: float = FINE) -> bool:
        return differentiate(function, steps(epsilon), epsilon, 1.0, 0.0, function(0.0)).kinked

    assert kinked(lambda t: max(0.0, t) * 3.0 + math.sin(t)) and kinked(abs) and kinked(lambda t: max(t, 0.1 * t))
    assert kinked(lambda t: float(np.float32(max(0.0, t))), SINGLE)
    assert not any(kinked(smooth) for smooth in (math.sin, math.exp, math.cos, lambda t: 40 * t * t + t**3))
    assert not kinked(lambda t: float(np.float32(math.cos(t) + t * t)), SINGLE)


def test_differences_that_do_not_converge_are_no_derivative() -> None:
    assert slope(lambda t: t / math.sqrt(t * t + 1e-12)).error == math.inf
    assert judge(1e6, slope(lambda t: t / math.sqrt(t * t + 1e-12)), 1e6, 1.0, 1e-12) == "undetermined"


def test_noise_shows_in_the_error() -> None:
    random = np.random.default_rng(0)
    noisy = slope(lambda t: t + 1e-3 * random.normal(), SINGLE)
    assert abs(noisy.value - 1.0) <= 5 * noisy.error


@pytest.mark.parametrize(
    ("analytic", "numeric", "expected"),
    [
        (1.0, Derivative(1.0, 1e-9), "right"),
        (1.0, Derivative(1.0005, 1e-9), "right"),
        (1.0, Derivative(1.004, 1e-9), "undetermined"),  # approximate formulas of backward stay below one per cent
        (0.5, Derivative(1.0, 1e-9), "wrong"),
        (0.5, Derivative(1.0, 0.09), "wrong"),
        (0.5, Derivative(1.0, 0.11), "undetermined"),
        (1.0, Derivative(1.0, 0.3), "undetermined"),
        (0.0, Derivative(0.0, 0.0), "zero"),
        (0.0, Derivative(1e-12, 1e-11), "zero"),
        (0.0, Derivative(0.1, 0.1), "undetermined"),
        (math.nan, Derivative(1.0, 0.0), "undetermined"),
        (1.0, Derivative(math.inf, 0.0), "undetermined"),
    ],
)
def test_what_may_be_concluded(analytic: float, numeric: Derivative, expected: str) -> None:
    assert judge(analytic, numeric, abs(analytic), 1.0, 1e-6) == expected


def test_a_direction_that_cancels_is_judged_by_what_it_consists_of() -> None:
    assert judge(1e-5, Derivative(2e-5, 1e-9), 1.0, 1.0, 1e-6) == "right"


def test_small_steps_count_where_large_ones_say_the_same() -> None:
    coarse, fine = Derivative(1.001, 0.2), Derivative(1.0, 1e-9)
    assert confirmed(coarse, fine) == fine
    assert confirmed(coarse, Derivative(0.5, 1e-9)) == coarse  # half of it went through coarse arithmetic
    assert confirmed(coarse) == coarse

"""Ratio formulas of scenario files."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_dist.axes import AXIS_NAMES
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.scenarios.formula import NAMES, Formula

VALUES = {
    "R": 4,
    "K": 3,
    "M": 2,
    "S": 12,
    "N": 296,
    "N_r": 100,
    "n_c": 37,
    "k": 0,
    "m": 1,
    "r": 2,
    "h": 3,
} | dict.fromkeys(AXIS_NAMES, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1/R", Fraction(1, 4)),
        ("R**(K-1-k)", Fraction(16)),
        ("M**-(K-1-k)", Fraction(1, 4)),
        ("N/(R*N_r)", Fraction(296, 400)),
        ("N/(R*K*n_c)", Fraction(296, 4 * 3 * 37)),
        ("r == h", Fraction(0)),
        ("r // dp_shard == h // dp_shard", Fraction(1)),
        ("(r == h)**(k == K-1)", Fraction(1)),
        ("R**(m != 0) * (k < K) * (k <= 0) * (k >= 0)", Fraction(4)),
        ("1/cp - h % 2", Fraction(-1, 2)),
    ],
)
def test_a_formula_is_exact(text: str, value: Fraction) -> None:
    assert Formula(text).evaluate(VALUES) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "R.real",
        "(lambda: 1)()",
        "[1][0]",
        "'a'*9",
        "True",
        "1.5",
        "W",
        "1/(k-k)",
        "R**(K**K**K**K**K)",
        "(N**4096)**4096",
        "R**(1/2)",
        "",
        "1 if R else 2",
        "k < m < r",
        "r in h",
        "k and m",
        "r % (k-k)",
        "(" * 500,
    ],
)
def test_what_is_no_arithmetic_is_refused_with_the_legal_names(text: str) -> None:
    with pytest.raises(GradcheckError, match="data-parallel ranks") as caught:
        Formula(text)
    assert caught.value.code == "E602"


@given(st.dictionaries(st.sampled_from(sorted(NAMES)), st.integers(1, 50), min_size=len(NAMES)))
def test_a_mean_of_means_weighs_each_mean_alike(values: dict[str, int]) -> None:
    per_token = Formula("N/(R*K*n_c)").evaluate(values) / values["N"]
    assert per_token * values["n_c"] == Fraction(1, values["R"] * values["K"])

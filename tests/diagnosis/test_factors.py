"""Naming a number: every name is a true one, simplest first, and a chain of scalings composes as expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trainers import global_mean
from simulator import Hand, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.weights.factors import exact_fraction, name_number

QUANTITIES = {"dp_replicate": 4.0, "accumulation_steps": 4.0, "pp": 2.0, "microbatches": 3.0, "num_tokens": 296.0}
DEGREES = st.dictionaries(
    st.sampled_from(["dp_replicate", "dp_shard", "tp", "pp", "cp", "accumulation_steps", "microbatches"]),
    st.integers(1, 16).map(float),
    min_size=1,
    max_size=5,
)


def value_of(expression: str, quantities: dict[str, float]) -> float:
    return float(eval(expression.replace("^", "**"), {"__builtins__": {}}, quantities))


@given(DEGREES, st.lists(st.sampled_from([-2, -1, 1, 2]), min_size=1, max_size=3))
def test_a_product_of_degrees_is_named_by_expressions_that_equal_it(
    degrees: dict[str, float], exponents: Sequence[int]
) -> None:
    value = prod(number**exponent for number, exponent in zip(degrees.values(), exponents, strict=False))
    names = name_number(value, degrees, 1e-9)
    assert names
    for name in names:
        assert value_of(name.expression, degrees) == pytest.approx(value, rel=1e-8)
        assert name.value == pytest.approx(value, rel=1e-8)


@given(st.floats(1e-6, 1e6), DEGREES)
def test_any_name_that_is_given_is_true_within_the_tolerance(value: float, degrees: dict[str, float]) -> None:
    for name in name_number(value, degrees, 1e-3):
        assert value_of(name.expression, degrees) == pytest.approx(value, rel=2e-3)


def test_the_simplest_name_comes_first_and_equal_ones_stand_beside_it() -> None:
    names = [name.expression for name in name_number(0.25, QUANTITIES, 1e-6)]
    assert set(names[:2]) == {"1/dp_replicate", "1/accumulation_steps"}


def test_the_name_of_the_events_own_number_is_preferred() -> None:
    names = name_number(0.25, QUANTITIES, 1e-6, near=frozenset({"dp_replicate"}))
    assert names[0].expression == "1/dp_replicate"


def test_padded_tokens_are_no_squares_of_two_degrees() -> None:
    degrees = {"microbatches": 4.0, "world_size": 4.0, "pp": 2.0}
    assert name_number(186 / 256, {**degrees, "num_tokens": 186.0}, 1e-6) == []
    (name, *_) = name_number(186 / 16, {**degrees, "num_tokens": 186.0}, 1e-6)
    assert dict(name.powers)["num_tokens"] == 1


def test_the_product_of_two_own_numbers_is_preferred_to_the_square_of_one() -> None:
    """HSDP of 2 x 2 ranks that lacks its division by 4: all ranks are no axis of the reduction, and 2^2 is no group."""
    degrees = {"dp_replicate": 2.0, "dp_shard": 2.0, "world_size": 4.0, "accumulation_steps": 3.0}
    names = name_number(4.0, degrees, 1e-6, near=frozenset({"dp_replicate", "dp_shard"}))
    near = [name.expression for name in names if "world_size" not in name.expression]
    assert near[0] == "dp_replicate * dp_shard"


def test_a_number_that_is_made_of_nothing_known_has_no_name() -> None:
    assert name_number(0.7312, QUANTITIES, 1e-6) == []
    assert name_number(-1.0, QUANTITIES, 1e-6) == []


@given(st.fractions(min_value=Fraction(1, 64), max_value=64, max_denominator=64))
def test_a_small_fraction_is_printed_exactly(fraction: Fraction) -> None:
    assert exact_fraction(float(fraction), 1e-7) == str(fraction)


def test_a_noisy_number_is_no_fraction_by_chance() -> None:
    assert exact_fraction(0.7312, 1e-2) is None


FACTORS = st.floats(0.05, 20).filter(lambda factor: abs(factor - 1) > 0.05)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(FACTORS, min_size=1, max_size=3), st.integers(1, 4), st.integers(2, 4), st.booleans(), st.integers(0, 99)
)
def test_a_chain_of_scalings_is_measured_as_its_product(
    factors: list[float], accumulation: int, ranks: int, average: bool, seed: int
) -> None:
    """Root, reduction, own hands before and behind the clip: whatever the chain, observed = composed."""
    places = ("before_step", "before_clip", "before_optimizer")
    hands = tuple(Hand(place, factor) for place, factor in zip(places, factors, strict=False))
    trainer = Trainer(root=global_mean(float(ranks) if average else 1.0), op="avg" if average else "sum",
                      data_ranks=ranks, accumulation=accumulation, hands=hands, clip=0.5)  # fmt: skip
    report = diagnose(World(trainer, seed).run())
    composed = prod(factors[: len(hands)])
    assert {round(weight.ratio or 0, 9) for weight in report.weights}
    for weight in report.weights:
        assert weight.ratio == pytest.approx(composed, rel=1e-4)
    if not 0.9e-5 < abs(composed - 1) < 1.1e-5:  # on the edge of what matters either verdict is right
        assert (report.verdict == "clean") == (abs(composed - 1) < 1e-5)
    healthy = replace(trainer, hands=())
    assert diagnose(World(healthy, seed).run()).verdict == "clean"


def test_a_few_tokens_over_squares_are_no_name_of_a_small_fraction() -> None:
    counted = {"num_tokens": 12.0, "dp_replicate": 2.0}
    assert name_number(1 / 3, counted, 1e-6) == []
    assert [name.expression for name in name_number(6.0, counted, 1e-6)] == ["num_tokens/dp_replicate"]
    many = {"num_tokens": 8111.0, "dp_replicate": 2.0}
    assert [name.expression for name in name_number(8111 / 4, many, 1e-6)] == ["num_tokens/dp_replicate^2"]


def test_two_hands_are_told_before_one_that_acts_twice() -> None:
    """Ultralytics multiplies by the processes and does not divide by accumulation steps: of both there are two."""
    counted = {"accumulation_steps": 2.0, "dp_replicate": 2.0}
    first, *others = [name.expression for name in name_number(4.0, counted, 1e-6)]
    assert first == "accumulation_steps * dp_replicate"
    assert set(others) == {"accumulation_steps^2", "dp_replicate^2"}
    assert [name.expression for name in name_number(9.0, {"dp_replicate": 3.0, "tp": 2.0}, 1e-6)] == ["dp_replicate^2"]


def test_a_ratio_of_two_numbers_names_no_factor_that_is_known_to_some_percent_only() -> None:
    degrees = {"accumulation_steps": 2.0, "world_size": 3.0, "dp_replicate": 3.0}
    coarse = [one.expression for one in name_number(0.6889, degrees, 0.039)]
    assert coarse == []
    assert "accumulation_steps/world_size" in [one.expression for one in name_number(2 / 3, degrees, 1e-3)]
    assert "accumulation_steps * world_size" in [one.expression for one in name_number(6.1, degrees, 0.039)]

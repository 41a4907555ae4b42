"""The expected ledger: exact fractions from token counts alone."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.ledger.expected import OBJECTIVES, expected_weights
from gradcheck_dist.objectives import OBJECTIVE_NAMES, check_objective

TOKENS = {(0, 0, 0): 10, (0, 1, 0): 30, (1, 0, 0): 5, (1, 1, 0): 15}
KEYS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2))
COUNTS = st.dictionaries(KEYS, st.integers(1, 10**6), min_size=1, max_size=12)


def test_a_mean_over_all_tokens_weighs_every_token_alike() -> None:
    assert set(expected_weights("global-token-mean", TOKENS).values()) == {Fraction(1, 60)}


def test_a_mean_of_means_weighs_a_token_by_its_microbatch() -> None:
    weights = expected_weights("microbatch-mean", TOKENS)
    assert weights[0, 1, 0] == Fraction(1, 4 * 30)
    assert weights[1, 0, 0] == Fraction(1, 4 * 5)


def test_a_mean_of_rank_means_weighs_a_token_by_its_rank() -> None:
    weights = expected_weights("rank-token-mean", TOKENS)
    assert weights[0, 0, 0] == weights[0, 1, 0] == Fraction(1, 2 * 40)
    assert weights[1, 0, 0] == Fraction(1, 2 * 20)


def test_a_sum_weighs_every_token_one() -> None:
    assert set(expected_weights("sum", TOKENS).values()) == {Fraction(1)}


def test_contributions_without_tokens_get_no_weight_and_count_for_nothing() -> None:
    padded = {**TOKENS, (1, 2, 0): 0}
    for objective in OBJECTIVES:
        assert expected_weights(objective, padded) == expected_weights(objective, TOKENS)
    assert expected_weights("microbatch-mean", {(0, 0, 0): 0}) == {}


@given(COUNTS)
def test_every_mean_adds_up_to_one(tokens: dict[tuple[int, int, int], int]) -> None:
    for objective in set(OBJECTIVES) - {"sum"}:
        weights = expected_weights(objective, tokens)
        assert sum(weight * tokens[key] for key, weight in weights.items()) == 1


@given(st.dictionaries(KEYS, st.just(7), min_size=1, max_size=12))
def test_equal_microbatches_make_a_mean_of_means_the_mean(tokens: dict[tuple[int, int, int], int]) -> None:
    assert expected_weights("microbatch-mean", tokens) == expected_weights("global-token-mean", tokens)


def test_an_unknown_objective_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(GradcheckError, match="global-token-mean") as caught:
        check_objective("global-mean")
    assert caught.value.code == "E401"


def test_every_objective_that_may_be_named_has_its_formula() -> None:
    assert tuple(OBJECTIVES) == OBJECTIVE_NAMES

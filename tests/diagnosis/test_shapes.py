"""Shapes of unknown bugs in words: which part is off, and powers of counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gradcheck_dist.diagnosis.weights.shapes import Place, counts, power_law, where

PLACES = [Place((rank, k, m), holder, holder) for rank, k, m, holder in itertools.product(*map(range, (2, 3, 2, 2)))]


@pytest.mark.parametrize(
    ("is_wrong", "words"),
    [
        (lambda place: place.key[1] == 2, "the last accumulation step (2)"),
        (lambda place: place.key[2] == 0, "the first microbatch (0)"),
        (lambda place: place.key[0] == 1, "data rank 1"),
        (lambda place: place.key[1] < 2 and place.key[0] == 0, "data rank 0 and accumulation steps 0, 1"),
        (lambda place: place.holder == 1, "holder rank 1"),
        (lambda place: place.key[0] == place.holder, "each rank's own contributions"),
        (lambda place: place.key[0] != place.holder, "other ranks' contributions"),
        (lambda place: place.key[0] + place.key[1] == 1, "8 of 24 weights"),
    ],
)
def test_a_part_is_named_by_what_singles_it_out(is_wrong: object, words: str) -> None:
    wrong = [place for place in PLACES if is_wrong(place)]  # type: ignore[operator]
    assert where(wrong, PLACES) == words


KEYS = [(rank, k, 0) for rank in range(2) for k in range(4)]
TOKENS = dict(zip(KEYS, [5, 9, 14, 6, 8, 11, 3, 10], strict=True))


@pytest.mark.parametrize("power", [-2, -1, -0.5, 1, 2])
@pytest.mark.parametrize("name", ["n_c", "N_k", "(k+1)", "(K-k)"])
def test_a_power_of_a_count_is_found_with_its_factor(name: str, power: float) -> None:
    quantities = counts(KEYS, TOKENS, {}, 1e-3)
    assert "(r+1)" not in quantities  # two ranks fit any power
    ratios = 0.7 * np.array(quantities[name]) ** power * (1 + 1e-6 * np.sin(range(8)))

    found = power_law(ratios, np.full(8, 1e-4), quantities)

    assert found is not None
    assert found == (pytest.approx(0.7, rel=1e-4), name, power)


def test_what_follows_no_power_gets_no_name() -> None:
    ratios = np.array([1.0, 1.3, 0.8, 1.0, 2.0, 1.0, 0.4, 1.0])
    assert power_law(ratios, np.full(8, 1e-4), counts(KEYS, TOKENS, {}, 1e-4)) is None
    assert power_law(ratios, np.full(8, 0.5), counts(KEYS, TOKENS, {}, 0.5)) is None


def test_two_numbers_of_tokens_are_enough_where_ratios_are_precise() -> None:
    keys = KEYS[:2] + KEYS[4:6]  # two accumulation steps on two ranks
    ratios = 30 / np.array([13.0, 20.0, 13.0, 20.0])  # over the tokens of each step on all ranks
    tokens = dict(zip(keys, [5, 9, 8, 11], strict=True))
    assert power_law(ratios, np.full(4, 1e-5), counts(keys, tokens, {}, 1e-5)) == (pytest.approx(30), "N_k", -1)
    assert "N_k" not in counts(keys, tokens, {}, 1e-2)

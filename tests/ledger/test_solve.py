"""Small least-squares problems: what can be seen is exact, what cannot be seen is said to be so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_dist.ledger.buffers import Column
from gradcheck_dist.ledger.composed import made_up_of
from gradcheck_dist.ledger.solve import EPSILON, solve

RANDOM = np.random.default_rng(0)
SINGLE = EPSILON["float32"]
COLUMNS = RANDOM.normal(size=(64, 3))


def test_coefficients_are_found_with_their_error() -> None:
    found = solve(COLUMNS, COLUMNS @ [1.0, 0.25, 4.0], SINGLE)
    assert found is not None and found.fits
    assert found.coefficients == pytest.approx([1.0, 0.25, 4.0], abs=1e-9)
    assert np.all(found.stderr < 1e-6)


def test_parallel_columns_share_the_coefficient_that_gives_their_sum() -> None:
    columns = np.stack([COLUMNS[:, 0], 3 * COLUMNS[:, 0], COLUMNS[:, 1]], axis=1)
    found = solve(columns, columns @ [0.5, 0.5, 2.0], SINGLE)
    assert found is not None
    assert found.coefficients == pytest.approx([0.5, 0.5, 2.0], abs=1e-9)


def test_parallel_columns_that_are_documented_unequally_share_their_sum_so() -> None:
    columns = np.stack([COLUMNS[:, 0], COLUMNS[:, 0], COLUMNS[:, 1]], axis=1)
    found = solve(columns, columns @ [1.0, 0.5, 2.0], SINGLE, nominal=np.array([1.0, 0.5, 1.0]))
    assert found is not None
    assert found.coefficients == pytest.approx([1.0, 0.5, 2.0], abs=1e-9)


def test_parallel_columns_of_which_one_was_left_out_are_not_told_apart() -> None:
    columns = np.stack([COLUMNS[:, 0], 3 * COLUMNS[:, 0], COLUMNS[:, 1]], axis=1)
    found = solve(columns, columns @ [1.0, 0.0, 2.0], SINGLE, documented=np.array([1.0, 0.0, 1.0]))
    assert found is not None
    assert np.isnan(found.coefficients[:2]).all()
    assert found.coefficients[2] == pytest.approx(2.0)


def test_parallel_columns_whose_sum_is_not_there_are_none_of_them_there() -> None:
    columns = np.stack([COLUMNS[:, 0], 3 * COLUMNS[:, 0], COLUMNS[:, 1]], axis=1)
    found = solve(columns, columns @ [0.0, 0.0, 2.0], SINGLE, documented=np.array([1.0, 0.0, 1.0]))
    assert found is not None
    assert found.coefficients == pytest.approx([0.0, 0.0, 2.0], abs=1e-9)
    assert np.all(found.stderr < 1e-6)


def test_parallel_columns_that_noise_may_hide_are_not_taken_for_absent() -> None:
    columns = np.stack([COLUMNS[:, 0], 3 * COLUMNS[:, 0], COLUMNS[:, 1]], axis=1)
    noise = 2.0 * np.random.default_rng(0).normal(size=len(columns))
    found = solve(columns, columns @ [1.0, 0.0, 2.0] + noise, SINGLE, documented=np.array([1.0, 0.0, 1.0]))
    assert found is not None and np.isnan(found.coefficients[:2]).all()


def test_a_sum_beside_its_summands_again_is_shared_as_documented() -> None:
    """What two ranks reduced, and the same gradients again: the columns are dependent, but for rounding."""
    parts = COLUMNS[:, :2].astype(np.float32).astype(float)
    total = parts.sum(axis=1).astype(np.float32).astype(float)
    weights = np.eye(4)
    columns = [
        Column(data, nominal=1.0, weights=own, stderr=np.zeros(4))
        for data, own in zip((total, *parts.T), (weights[0] + weights[1], weights[2], weights[3]), strict=True)
    ]
    values = (2 * total).astype(np.float32).astype(float)
    found = made_up_of(columns, values, SINGLE, len(weights), passes=np.array([0, 0, 1, 1]))
    assert found is not None and found[3].fits
    assert found[0] == pytest.approx([1.0, 1.0, 1.0, 1.0], abs=1e-6)
    assert np.all(found[1] < 1e-5)


def test_dependent_columns_are_solved_whatever_their_rounding() -> None:
    """Of some roundings the products of the columns are singular."""
    for seed in range(400):
        parts = np.random.default_rng(seed).normal(size=(12, 2)).astype(np.float32)
        columns = np.column_stack([parts.sum(axis=1), parts]).astype(float)
        found = solve(columns, columns @ [1.0, 1.0, 1.0], SINGLE)
        assert found is not None and found.fits


def test_what_no_column_explains_is_left_whole() -> None:
    found = solve(np.zeros((4, 0)), np.full(4, 3.0), SINGLE)
    assert found is not None and (found.fits, found.residual, found.sigma) == (False, 1.0, 3.0)


def test_opposite_columns_are_not_told_apart() -> None:
    columns = np.stack([COLUMNS[:, 0], -COLUMNS[:, 0], COLUMNS[:, 1]], axis=1)
    found = solve(columns, columns @ [1.0, 1.0, 2.0], SINGLE)
    assert found is not None
    assert np.isnan(found.coefficients[:2]).all()
    assert found.coefficients[2] == pytest.approx(2.0)


def test_a_column_of_zeros_cannot_be_seen() -> None:
    columns = COLUMNS.copy()
    columns[:, 1] = 0
    found = solve(columns, columns @ [1.0, 1.0, 1.0], SINGLE)
    assert found is not None
    assert np.isnan(found.coefficients[1])
    assert found.coefficients[[0, 2]] == pytest.approx([1.0, 1.0])


def test_what_is_no_combination_of_the_columns_does_not_fit() -> None:
    found = solve(COLUMNS, COLUMNS @ [1.0, 1.0, 1.0] + 1e-3 * RANDOM.normal(size=64), SINGLE)
    assert found is not None and not found.fits


def test_nothing_is_answered_when_nothing_would_check_the_answer() -> None:
    assert solve(COLUMNS[:3], COLUMNS[:3] @ [1.0, 1.0, 1.0], SINGLE) is None


def test_summands_that_cancel_have_errors_as_large_as_their_rounding() -> None:
    """A key bias: each contribution is large, their sum is nothing but rounding."""
    noise = 1e-8 * RANDOM.normal(size=(64, 2))
    columns = np.stack([COLUMNS[:, 0], -COLUMNS[:, 0]], axis=1) + noise
    found = solve(columns, columns.sum(axis=1), SINGLE, np.ones(2))
    assert found is not None
    assert np.isnan(found.coefficients).any() or np.all(found.stderr > 0.1)


def test_a_loss_scale_that_was_not_undone_in_the_documents_does_not_blow_up_the_errors() -> None:
    found = solve(COLUMNS, COLUMNS.sum(axis=1) / 65536, SINGLE, np.ones(3))
    assert found is not None
    assert np.all(found.stderr < 1e-4 / 65536)


@given(st.lists(st.floats(-8, 8).filter(lambda value: abs(value) > 0.01), min_size=1, max_size=5))
def test_what_was_rounded_to_bfloat16_lies_within_six_standard_errors(weights: list[float]) -> None:
    random = np.random.default_rng(len(weights))
    columns = random.normal(size=(256, len(weights)))
    exact = columns @ weights
    rounding = EPSILON["bfloat16"] * exact * random.uniform(-0.5, 0.5, size=256)
    found = solve(columns, exact + rounding, EPSILON["bfloat16"], np.array(weights))
    assert found is not None and found.fits
    assert np.all(np.abs(found.coefficients - weights) <= 6 * found.stderr)


def test_errors_are_known_where_few_elements_are_much_larger_than_the_others() -> None:
    rng, errors = np.random.default_rng(3), []
    for _ in range(200):
        columns = rng.standard_normal((96, 2)) ** 7
        rounded = columns.sum(axis=1).astype(np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000
        solution = solve(columns, rounded.view(np.float32).astype(float), EPSILON["bfloat16"], np.ones(2))
        assert solution is not None
        errors.append((solution.coefficients - 1) / solution.stderr)
    assert 0.4 < np.sqrt(np.mean(np.square(errors))) < 1.3


def test_an_arbitrary_vector_is_no_combination_of_nearly_as_many_columns() -> None:
    random = np.random.default_rng(0)
    columns = random.normal(size=(32, 1)) + 0.3 * random.normal(size=(32, 30))
    arbitrary, combined = random.normal(size=32), columns @ np.full(30, 0.1)
    for epsilon, y, expected in ((2.0**-7, arbitrary, False), (2.0**-23, combined, True)):
        solution = solve(columns, y, epsilon)
        assert solution is not None
        assert solution.checked is expected


@pytest.mark.parametrize("opposite", [False, True])
def test_columns_of_one_direction_but_for_their_rounding_explain_their_sum(opposite: bool) -> None:
    """The bias of two classes: g and -g, each a sum that cancelled, so that its rounding is large beside it."""
    first = np.array([-0.0009086, 0.0009086 + 1.5e-8])
    second = np.array([0.00089432 + 1.5e-8, -0.00089432]) * (1 if opposite else -1)
    columns = np.stack([first, second], axis=1)
    found = solve(columns, columns @ [0.5, 0.5], EPSILON["float32"], nominal=np.array([0.5, 0.5]))
    assert found is not None and found.fits
    assert np.isnan(found.coefficients).all() if opposite else found.coefficients == pytest.approx([0.5, 0.5], rel=1e-4)
    more = solve(columns, columns @ [0.5, 0.5] + [1e-6, 1e-6], EPSILON["float32"], nominal=np.array([0.5, 0.5]))
    assert more is not None and not more.fits


def test_a_direction_beside_two_that_count_as_one_is_no_better_known_than_their_difference() -> None:
    """Three passes over nearly one batch (a physics-informed network's points of the boundary): the second lies between
    the other two, near enough to the first to count as parallel, and the third takes up what that leaves out."""
    first, aside = np.linalg.qr(COLUMNS[:, :2])[0].T
    columns = np.stack([first, first + 3e-5 * aside, first + 8e-5 * aside], axis=1)
    found = solve(columns, columns.sum(axis=1), SINGLE)
    assert found is not None and found.fits
    assert np.all(np.abs(found.coefficients - 1) < 6 * found.stderr)
    assert found.coefficients.sum() == pytest.approx(3, abs=1e-6)
    apart = solve(columns[:, [0, 2]], columns[:, [0, 2]] @ [1.0, 0.5], SINGLE)
    assert apart is not None and apart.coefficients == pytest.approx([1.0, 0.5], abs=1e-4)
    assert np.all(apart.stderr < 1e-2)


def test_what_is_too_small_to_change_a_sum_may_be_in_it_all_the_same() -> None:
    rng = np.random.default_rng(0)
    large, small = np.round(rng.normal(size=128) * 256), rng.normal(size=128) / 4  # half a spacing of 256 is 1
    coefficients = {}
    for epsilon in (EPSILON["bfloat16"], EPSILON["float32"]):
        found = solve(np.stack([large, small], axis=1), large, epsilon, nominal=np.ones(2))
        assert found is not None
        coefficients[epsilon] = found.coefficients[1], found.stderr[1]
    (lost, error), (none, sure) = coefficients.values()
    assert abs(lost) < 0.1 and error > 0.5  # 1 is well within six of these
    assert abs(none) < 1e-4 and sure < 1e-3


def test_errors_without_a_bound_are_those_of_what_a_column_stands_for_alone() -> None:
    """Three columns in one plane: none of the three coefficients is known, and what is in no column is known not to
    be there."""
    data = np.stack([COLUMNS[:, 0], COLUMNS[:, 1], COLUMNS[:, 0] + COLUMNS[:, 1]])
    columns = [Column(one, weights, np.zeros(4), 1.0) for one, weights in zip(data, np.eye(3, 4), strict=True)]
    found = made_up_of(columns, data.sum(axis=0), SINGLE, 4)
    assert found is not None
    assert found[1].tolist() == [np.inf, np.inf, np.inf, 0.0]


@pytest.mark.parametrize("epsilon", [EPSILON["float64"], SINGLE, EPSILON["bfloat16"]])
@pytest.mark.parametrize("num_columns", [1, 2])
def test_few_columns_are_solved_to_what_the_general_way_gives(num_columns: int, epsilon: float) -> None:
    columns = COLUMNS[:, :num_columns]
    weights = np.array([0.3, 7.0])[:num_columns]
    y = columns @ weights * (1 + (0.1 * epsilon * RANDOM.normal(size=64) if epsilon > 1e-12 else 0.0))
    found = solve(columns, y, epsilon, nominal=np.ones(num_columns))
    # A column of zeros more, or a third that hardly is in y, goes the general way.
    further = np.append(columns, np.zeros((64, 1)) if num_columns == 1 else 1e-9 * COLUMNS[:, 2:], axis=1)
    general = solve(further, y, epsilon, nominal=np.append(np.ones(num_columns), 0.0))
    assert found is not None and general is not None
    assert found.fits and general.fits and found.residual < 0.5 * epsilon
    assert found.coefficients == pytest.approx(general.coefficients[:num_columns], rel=max(1e-12, epsilon))
    assert found.stderr == pytest.approx(general.stderr[:num_columns], rel=0.05)
    assert found.covariance is not None and general.covariance is not None
    assert np.diag(found.covariance) == pytest.approx(found.stderr**2)
    assert found.gate == pytest.approx(general.gate, rel=1e-3)


def test_two_columns_close_to_parallel_are_solved_without_their_products() -> None:
    columns = np.stack([COLUMNS[:, 0], COLUMNS[:, 0] + 1e-4 * COLUMNS[:, 1]], axis=1)
    found = solve(columns, columns @ [2.0, -1.0], SINGLE)
    assert found is not None and found.coefficients == pytest.approx([2.0, -1.0], abs=1e-9)

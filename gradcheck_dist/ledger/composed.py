"""What a sample is made of: the weights over contributions of a buffer, composed from those of its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, sqrt

import numpy as np

from gradcheck_dist.ledger.buffers import Column
from gradcheck_dist.ledger.small_arrays import without_nan
from gradcheck_dist.ledger.solve import SURE_SIGMAS, Solution, confirm, solve

Measured = tuple[np.ndarray, np.ndarray, np.ndarray, Solution]
"""Weights, their standard errors, the part of these that is the measurement's own, and the solution they are from."""

UNCHANGED = 1e-4
"""Relative difference up to which a buffer is what its records say."""
UNLIKE = 0.05
"""Share of the largest weight by which weights of parts of a sample differ that are not the same."""
NEARLY = 0.99
"""Cosine, without its sign, below which two vectors are no multiples of one another in any precision."""


def made_up_of(
    columns: Sequence[Column],
    values: np.ndarray,
    epsilon: float,
    num_contributions: int,
    documented: np.ndarray | None = None,
    passes: np.ndarray | None = None,
) -> Measured | None:
    """The weights of what was sampled, from those of the columns that may be in it.

    Where there are more columns than elements (the ranks of a large group), or one is a combination of others (a sum
    over ranks, beside the same gradients again), what the records say is tried alone: these columns with their nominal
    coefficients, times one number for all of them.

    Args:
        values: shape (num_positions,), NaN where nothing was sampled.
        documented: see `solve`.
        passes: shape (num_contributions,), the number of each one's pass, one for the same pass of all ranks.

    Returns:
        None where the weights of a column are not known, or too few elements were sampled.
    """
    usable = [column for column in columns if column.weights is not None]
    if len(usable) < len(columns):
        return None
    seen, matrix = values, _side_by_side([column.data for column in usable], len(values))
    known = np.isfinite(values) & np.isfinite(matrix).all(axis=1)
    if not known.all():
        matrix, seen = matrix[known], values[known]
    if not len(seen):
        return None
    nominal = np.array([column.nominal for column in usable])
    solution = solve(matrix, seen, epsilon, nominal, documented)
    if (solution is None or solution.dependent) and documented is None:
        confirmed = confirm(matrix, seen, epsilon, nominal, () if passes is None else _passes(usable, passes))
        solution = confirmed or solution
    return None if solution is None else _composed(usable, solution, num_contributions)


def _side_by_side(vectors: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Vectors of shape (num_rows,) as the columns of a matrix."""
    if len(vectors) == 1:
        return vectors[0][:, None]
    found = np.empty((num_rows, len(vectors)))
    for index, vector in enumerate(vectors):
        found[:, index] = vector
    return found


def where_not_known(columns: Sequence[Column], values: np.ndarray) -> np.ndarray | None:
    """What was sampled where a column is not known, NaN elsewhere; None where there is no such thing. A buffer that was
    reduced to a part of it holds elsewhere what it held, and what is computed from it next may be of both."""
    found = [holes for column in columns if (holes := np.isnan(column.data)).any()]
    if not found:
        return None
    holes = found[0] if len(found) == 1 else np.any(found, axis=0)
    return np.where(holes, values, np.nan) if without_nan(values[holes]).any() else None


def is_another(found: Measured, other: Measured) -> bool:
    """Whether some elements are surely made of something else than the others."""
    if not (other[3].fits and other[3].checked) or np.isnan(other[0]).any():
        return False
    allowed = UNLIKE * max(float(np.abs(found[0]).max()), float(np.abs(other[0]).max()))
    return bool((np.abs(found[0] - other[0]) > allowed + SURE_SIGMAS * (found[1] + other[1])).any())


def is_unchanged(columns: Sequence[Column], values: np.ndarray) -> bool:
    """Whether a buffer is what its records say.

    Args:
        columns: what it was made of.
        values: what was sampled.
    """
    seen = without_nan(values)
    documented = sum((without_nan(column.data) * column.nominal for column in columns), np.zeros(()))
    return bool(np.linalg.norm(seen - documented) <= UNCHANGED * np.linalg.norm(seen))


def unless_others_would_do(
    found: Measured, values: np.ndarray, others: Mapping[int, np.ndarray], epsilon: float
) -> Measured:
    """What was measured, without the weights that nothing tells: a buffer that is no more what its records say, and a
    multiple of what others' passes gave as well, may hold these. Below a head of one output every pass gives a norm's
    bias the same direction, whoever's it is.

    Args:
        values: what was sampled.
        others: contributions that weigh nothing by what was found, and may have come into it.
    """
    unknown = found[0] != 0
    alike = [key for key, brought in others.items() if is_multiple(values, brought, epsilon)]
    unknown[alike] = True
    return (np.where(unknown, np.nan, 0.0), *found[1:]) if alike else found


def is_multiple(values: np.ndarray, other: np.ndarray, epsilon: float) -> bool:
    """Whether one sample is a multiple of another."""
    known = np.isfinite(values) & np.isfinite(other)
    first, second = values[known], other[known]
    if abs(float(first @ second)) <= NEARLY * float(np.linalg.norm(first) * np.linalg.norm(second)):
        return False  # also where one of them is zero: such a buffer holds nobody's
    solution = solve(second[:, None], first, epsilon)
    return solution is not None and solution.fits and solution.checked


def _passes(columns: Sequence[Column], passes: np.ndarray) -> list[int]:
    """Which pass each column, of known weights, is of; a number below zero of its own where it is of several."""
    holds = np.array([column.weights for column in columns]) != 0
    first = np.where(holds, passes, len(passes)).min(axis=1, initial=len(passes))
    last = np.where(holds, passes, -1).max(axis=1, initial=-1)
    found: list[int] = np.where(first == last, first, -1 - np.arange(len(columns))).tolist()
    return found


def _composed(columns: Sequence[Column], solution: Solution, num_contributions: int) -> Measured:
    if len(columns) == 1 and solution.covariance is not None and not isnan(solution.coefficients[0]):
        return _from_one(columns[0], solution)
    weights, variance, inherited = (np.zeros(num_contributions) for _ in range(3))
    for index, column in enumerate(columns):
        coefficient, error = solution.coefficients[index], solution.stderr[index]
        assert column.weights is not None
        holds = column.weights != 0
        if np.isnan(coefficient):
            weights[holds] = np.nan
            continue
        weights = weights + coefficient * column.weights
        # Columns that share a contribution have it from one earlier state: their errors are the same and add up.
        # Where the column's coefficient is hardly known, it may be larger, and these errors with it.
        off = column.stderr != 0
        inherited[off] = inherited[off] + (abs(coefficient) + error) * column.stderr[off]
        if solution.covariance is None:
            variance[holds] = variance[holds] + (error * column.weights[holds]) ** 2
    if solution.covariance is not None and columns:
        # What several columns have in common is known better than the share of each.
        stacked = np.array([without_nan(column.weights) for column in columns if column.weights is not None])
        variance = np.einsum("ij,ik,kj->j", stacked, solution.covariance, stacked).clip(min=0.0)
    return weights, np.sqrt(variance + inherited**2), np.sqrt(variance), solution


def _from_one(column: Column, solution: Solution) -> Measured:
    assert column.weights is not None and solution.covariance is not None
    coefficient, error = float(solution.coefficients[0]), float(solution.stderr[0])
    own = np.abs(without_nan(column.weights)) * sqrt(max(float(solution.covariance[0, 0]), 0.0))
    inherited = (abs(coefficient) + error) * column.stderr
    return coefficient * column.weights, np.sqrt(own * own + inherited * inherited), own, solution

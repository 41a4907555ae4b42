"""What a sample is made of: the weights over contributions of a buffer, composed from those of its columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcheck_dist.ledger.buffers import Column
from gradcheck_dist.ledger.solve import Solution, confirm, solve
from gradcheck_dist.ledger.tracks import Slot

Measured = tuple[np.ndarray, np.ndarray, np.ndarray, Solution]
"""Weights, their standard errors, the part of these that is the measurement's own, and the solution they are from."""


def made_up_of(
    columns: Sequence[Column],
    values: np.ndarray,
    epsilon: float,
    num_contributions: int,
    documented: np.ndarray | None = None,
    slots: Sequence[Slot] = (),
) -> Measured | None:
    """The weights of what was sampled, from those of the columns that may be in it.

    Where there are more columns than elements (the ranks of a large group), what the records say is tried alone: these
    columns with their nominal coefficients, times one number for all of them.

    Args:
        values: shape (num_positions,), NaN where nothing was sampled.
        documented: see `solve`.
        slots: of each contribution, where they are known.

    Returns:
        None where the weights of a column are not known, or too few elements were sampled.
    """
    usable = [column for column in columns if column.weights is not None]
    if len(usable) < len(columns):
        return None
    sampled = np.flatnonzero(np.isfinite(values))
    matrix = np.stack([column.data[sampled] for column in usable], axis=1) if usable else np.empty((len(sampled), 0))
    known = np.isfinite(matrix).all(axis=1)
    if not known.any():
        return None
    matrix, seen = matrix[known], values[sampled[known]]
    nominal = np.array([column.nominal for column in usable])
    solution = solve(matrix, seen, epsilon, nominal, documented)
    if solution is None and documented is None:
        solution = confirm(matrix, seen, epsilon, nominal, _passes(usable, slots) if slots else ())
    return None if solution is None else _composed(usable, solution, num_contributions)


def _passes(columns: Sequence[Column], slots: Sequence[Slot]) -> list[tuple[Slot, ...] | int]:
    """Which pass each column is of, its own number where it is of several."""
    found: list[tuple[Slot, ...] | int] = []
    for number, column in enumerate(columns):
        holds: list[int] = np.flatnonzero(column.weights).tolist() if column.weights is not None else []
        of = {slots[index] for index in holds}
        found.append(tuple(of) if len(of) == 1 else number)
    return found


def _composed(columns: Sequence[Column], solution: Solution, num_contributions: int) -> Measured:
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
        stacked = np.stack([np.nan_to_num(column.weights) for column in columns if column.weights is not None])
        variance = variance + np.einsum("ij,ik,kj->j", stacked, solution.covariance, stacked).clip(min=0.0)
    return weights, np.sqrt(variance + inherited**2), np.sqrt(variance), solution

"""What numpy does to arrays of any kind, for the small ones of which a step has thousands: there it is mostly asking
what it was given. The same numbers, to the last bit."""

from __future__ import annotations

from math import sqrt

import numpy as np


def length(vector: np.ndarray) -> float:
    """The norm of a vector, shape (n,), real."""
    return sqrt(float(vector.dot(vector)))


def lengths(columns: np.ndarray) -> np.ndarray:
    """The norm of each column, shape (num_columns,), of a matrix of shape (num_rows, num_columns), real."""
    found: np.ndarray = np.sqrt(np.add.reduce(columns * columns, axis=0))
    return found


def without_nan(values: np.ndarray) -> np.ndarray:
    """The values, 0 where one is NaN, and the largest number for infinity. Nobody may write to it."""
    return values if np.isfinite(values).all() else np.nan_to_num(values)

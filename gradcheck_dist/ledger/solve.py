"""Small least-squares problems: of which columns, with which coefficients, is a sampled gradient made."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf, sqrt

import numpy as np

from gradcheck_dist.ledger.small_arrays import length, lengths, without_nan

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Spacing of 1.0 in a dtype; half of it bounds the relative rounding error of one operation."""

COLLINEAR = 1e-9
"""Two columns are one direction when 1 - cos is below this; float32 rounding alone gives 1e-14."""

DEPENDENT = COLLINEAR**0.5
"""Ratio of singular values below which some column is a combination of others: of two columns, one direction."""

ROUNDING = 0.3
"""Standard deviation of one rounding to nearest, in units of epsilon: uniform in half a spacing, 1 / sqrt(12)."""

RESIDUAL_FACTOR = 4.0
"""Residual gate in units of dtype epsilon times the size of the summands (measured: 0.25 at most on healthy runs)."""


BY_CHANCE = 0.02
"""What an arbitrary vector would do more often than this is no answer."""

SURE_SIGMAS = 6.0
"""What is so many standard errors from zero is not zero."""

LEAST_TO_CONFIRM = 4
"""Elements; a bias of two says little, and a large world's shards come together to more."""

COARSE = 1e-5
"""With an epsilon above this, what is added may be too small to change a sum."""

FAR_APART = 0.9
"""Cosine, without its sign, up to which two columns are solved by their products."""

CANCELLED = 0.1
"""Summands have cancelled when what is left of them is smaller than this, relative to their size."""


@dataclass(frozen=True)
class Solution:
    """y = columns @ coefficients + residual.

    `coefficients` and `stderr` have shape (num_columns,); NaN where a column is zero on all rows, or the opposite of
    another one: it cannot be seen. Of parallel columns only the sum is known: they share it as documented, else
    equally. `residual` is relative to |y| plus the summands, `fits` tells whether it is within rounding; `sigma` is its
    standard deviation. `covariance` of the coefficients is None where some direction is not determined at all. `gate`
    is the largest residual, of the `freedom` rows to spare, that passes for rounding. `checked`: whether an arbitrary y
    would hardly have fitted. `as_documented`: the coefficients are the documented ones times one number. `dependent`:
    some column is nearly a combination of others.
    """

    coefficients: np.ndarray
    stderr: np.ndarray
    residual: float
    fits: bool
    num_rows: int
    sigma: float = 0.0
    covariance: np.ndarray | None = None
    gate: float = 0.0
    freedom: int = 0
    checked: bool = True
    as_documented: bool = False
    dependent: bool = False

    def shows(self, column: int) -> bool:
        """Whether a column is surely in y."""
        return bool(abs(self.coefficients[column]) > SURE_SIGMAS * self.stderr[column])  # False for NaN

    def chance(self, size: float) -> float:
        """How often y would fit with something of no meaning in it, whose norm over all rows is `size`."""
        return min(self.gate / size, 1.0) ** self.freedom if size else 1.0


def solve(
    columns: np.ndarray,
    y: np.ndarray,
    epsilon: float,
    nominal: np.ndarray | None = None,
    documented: np.ndarray | None = None,
) -> Solution | None:
    """Least squares with standard errors.

    The noise is what the residual shows, but at least the rounding of the summands: where they cancel (a key bias,
    whose gradient is zero), the residual alone would make a coefficient look exact that nothing determines.

    Args:
        columns: shape (num_rows, num_columns), float64.
        y: shape (num_rows,), float64.
        epsilon: dtype epsilon of the numbers that were summed.
        nominal: coefficients as documented, shape (num_columns,); they tell how large the summands were meant to be.
        documented: coefficients as documented, where `nominal` is not; parallel columns that are meant to be in it
            unequally are not told apart. NaN and None say nothing.

    Returns:
        None when there are no more rows than distinct non-zero columns: nothing would check the answer.
    """
    # Elements that got no gradient at all (rows of an embedding) tell nothing, and would make the rest look exact.
    told = columns.any(axis=1) | (y != 0)
    if told.any() and not told.all():
        columns, y = columns[told], y[told]
    num_rows, num_columns = columns.shape
    norms = lengths(columns)
    y_norm = length(y)
    if num_columns == 1 and 0 < norms[0] < inf and (nominal is None or not isinf(nominal[0])):
        return _solve_one(columns[:, 0], y, float(norms[0]), y_norm, epsilon)
    coefficients = np.full(num_columns, np.nan)
    stderr = np.full(num_columns, np.nan)
    seen = np.flatnonzero(norms > 0)
    if not len(seen):
        sigma = y_norm / sqrt(max(num_rows, 1))  # nothing explains any of it
        return Solution(coefficients, stderr, 0.0 if y_norm == 0 else 1.0, y_norm == 0, num_rows, sigma)
    unit = columns[:, seen] / norms[seen]
    kept, member_of, sign = _directions(unit)
    freedom = num_rows - len(kept)
    if freedom < 1:
        return None
    basis = unit[:, kept]
    alone = len(kept) == len(seen)  # no two are parallel: hundreds of ranks' columns need no loop
    gram = basis.T @ basis
    inverse = _inverse(gram) if alone else None
    if inverse is not None:
        x, determined, dependent = inverse @ (basis.T @ y), True, False
        x = x + inverse @ (basis.T @ (y - basis @ x))  # to the last digit, which float64 asks for
    else:
        x, _, rank, singular = np.linalg.lstsq(basis, y, rcond=None)
        determined, dependent = bool(rank == len(kept)), bool(singular[-1] < DEPENDENT * singular[0])
    rest = length(y - basis @ x)
    summands = np.abs(x)
    if nominal is not None:
        of_columns = without_nan(nominal[seen])
        as_meant = np.bincount(member_of, np.abs(of_columns) * norms[seen], minlength=len(kept))
        summands = np.maximum(summands, as_meant * _scale(columns[:, seen] @ of_columns, as_meant, y))
    size = y_norm + float(summands.sum())
    residual = rest / size if size else 0.0
    rounding = ROUNDING * epsilon * length(summands) / sqrt(num_rows)
    sigma = max(rest / sqrt(freedom), rounding)
    beside = np.zeros((num_rows, 0))
    if not alone:
        beside = _off_direction(
            columns[:, seen], unit, kept, member_of, x, nominal if nominal is None else nominal[seen]
        )
    if not determined:
        spread = np.diag(np.full(len(kept), np.inf))
    else:
        if dependent:  # the products of the columns would be singular
            root = np.linalg.inv(np.linalg.qr(basis, mode="r"))
            inverse = root @ root.T
        inverse = np.linalg.inv(gram) if inverse is None else inverse
        spread = max(inverse * (sigma * sigma), _own_rounding(inverse @ basis.T, basis * x, y, epsilon), key=np.trace)
        if epsilon > COARSE:
            spread = spread + np.diag(_swallowed(basis * summands, y, epsilon) ** 2)
        if not alone:
            # What lies beside a direction is in y too, and other directions that are nearly as close take it up.
            moved = inverse @ (basis.T @ beside)
            spread = spread + moved @ moved.T + np.outer(moved.sum(axis=1), moved.sum(axis=1))
    shares = np.zeros((num_columns, len(kept)))
    if alone:
        coefficients[seen] = x / norms[seen]
        stderr[seen] = np.sqrt(spread.diagonal()) / norms[seen]
        shares[seen, member_of] = 1.0 / norms[seen]
    for position, column in enumerate(() if alone else seen):
        group = member_of[position]
        members = np.flatnonzero(member_of == group)
        if (sign[members] < 0).any():
            continue  # opposite columns cancel: their coefficients cannot be seen
        error = float(np.sqrt(spread[group, group]))
        if documented is not None and np.ptp(said := documented[seen[members]]) > 0:
            least = np.min(np.abs(said * norms[seen[members]]), where=said != 0, initial=np.inf)
            if not (determined and abs(x[group]) <= SURE_SIGMAS * error < least / 2):  # else surely none is in it
                continue  # who of them is in it cannot be seen, and an equal share would put in what was left out
        # Any split of parallel columns gives the same sum: it is taken as documented, times one number.
        meant = np.ones(num_columns) if nominal is None or not (nominal[seen[members]] > 0).all() else nominal
        share = meant[column] / float(meant[seen[members]] @ norms[seen[members]])
        coefficients[column] = x[group] * share
        stderr[column] = error * share
        shares[column, group] = share
    covariance = shares @ spread @ shares.T if determined else None
    gate = RESIDUAL_FACTOR * epsilon * size  # below it each row to spare has to come by chance
    gate += 0.0 if alone else float(lengths(beside).sum())
    fits = rest <= gate if size else residual <= RESIDUAL_FACTOR * epsilon
    solution = Solution(
        coefficients,
        stderr,
        residual,
        fits,
        num_rows,
        rest / freedom**0.5,
        covariance,
        float(gate),
        freedom,
        dependent=dependent,
    )
    if freedom >= len(kept) or solution.chance(y_norm) < BY_CHANCE:
        return solution
    return replace(solution, checked=False)


def _solve_one(column: np.ndarray, y: np.ndarray, norm: float, y_norm: float, epsilon: float) -> Solution | None:
    """`solve` for one column of length `norm`, by the same formulas: most samples of a step are of one state before.
    What is documented says nothing there: y without its residual is the summand."""
    num_rows = len(y)
    freedom = num_rows - 1
    if freedom < 1:
        return None
    unit = column / norm
    square = float(unit.dot(unit))
    x = float(unit.dot(y)) / square
    coefficient = x / norm
    coefficient += float(unit.dot(y - column * coefficient)) / norm  # to the last digit, which float64 asks for
    along = column * coefficient
    rest = length(y - along)
    summand = abs(x)
    size = y_norm + summand
    residual = rest / size if size else 0.0
    sigma = max(rest / sqrt(freedom), ROUNDING * epsilon * summand / sqrt(num_rows))
    own = length(unit * np.maximum(np.abs(y), np.abs(along))) * ROUNDING * epsilon / square  # as _own_rounding
    spread = max(sigma * sigma / square, own * own)
    if epsilon > COARSE:
        lost = float(_swallowed(unit[:, None] * summand, y, epsilon)[0])
        spread += lost * lost
    gate = RESIDUAL_FACTOR * epsilon * size
    stderr = sqrt(spread) / norm
    return Solution(
        np.array([coefficient]),
        np.array([stderr]),
        residual,
        fits=rest <= gate,
        num_rows=num_rows,
        sigma=rest / sqrt(freedom),
        covariance=np.array([[stderr * stderr]]),
        gate=gate,
        freedom=freedom,
    )


def confirm(
    columns: np.ndarray, y: np.ndarray, epsilon: float, nominal: np.ndarray, passes: Sequence[Hashable] = ()
) -> Solution | None:
    """Whether y is what its records say, times one number: for more columns than rows, of which `solve` tells nothing.

    A combination without a free coefficient for each column is refuted by any one of them that is not in y as it
    should be, unless it is small on all rows; that is its standard error.

    Args:
        columns: shape (num_rows, num_columns), float64.
        y: shape (num_rows,), float64.
        epsilon: dtype epsilon of the numbers that were summed.
        nominal: coefficients as documented, shape (num_columns,).
        passes: for each column which pass it is of, one for the same pass of several ranks.

    Returns:
        None when it is not so, when an arbitrary y would pass for it, when a coefficient is not documented, or of too
        few elements. Also where some pass alone would be y, times a number, and others would not: what is
        differentiated sample by sample beside a batch adds up to the same as the batch.
    """
    if not np.isfinite(nominal).all() or not (predicted := columns @ nominal).any():
        return None
    told = columns.any(axis=1) | (y != 0)
    columns, y, predicted = columns[told], y[told], predicted[told]
    freedom = len(y) - 1
    square = float(predicted @ predicted)
    if len(y) < LEAST_TO_CONFIRM or not square:
        return None
    scale = float(predicted @ y) / square
    y_norm, rest = float(np.linalg.norm(y)), float(np.linalg.norm(y - scale * predicted))
    norms = np.linalg.norm(columns, axis=0)
    summands = np.abs(scale * nominal) * norms
    size = y_norm + float(summands.sum())
    # Sums of many terms are rounded as often, and no rounding is larger than the partial sum that it befalls.
    terms = ROUNDING * epsilon * max(y_norm, float(np.linalg.norm(summands))) * np.sqrt(np.count_nonzero(summands))
    gate = min(RESIDUAL_FACTOR * epsilon * size, SURE_SIGMAS * float(terms))
    sigma = max(rest, float(terms)) / np.sqrt(freedom)
    with np.errstate(divide="ignore"):
        stderr = np.where(norms > 0, sigma / norms, np.nan)
    coefficients = np.where(norms > 0, scale * nominal, np.nan)
    solution = Solution(
        coefficients,
        stderr,
        residual=rest / size,
        fits=rest <= gate,
        num_rows=len(y),
        sigma=rest / freedom**0.5,
        gate=gate,
        freedom=freedom,
        as_documented=True,
    )
    sure = solution.fits and solution.chance(y_norm) < BY_CHANCE
    return solution if sure and not _one_would_do(columns * nominal, y, gate, passes) else None


def _one_would_do(summands: np.ndarray, y: np.ndarray, gate: float, passes: Sequence[Hashable]) -> bool:
    of_pass: dict[Hashable, np.ndarray] = {}
    for column, one in enumerate(passes or range(summands.shape[1])):
        of_pass[one] = of_pass.get(one, 0.0) + summands[:, column]
    sums = [one / np.linalg.norm(one) for one in of_pass.values() if one.any()]
    alone = [bool(np.linalg.norm(y - one * float(one @ y)) <= gate) for one in sums]
    return any(alone) and not all(alone)


def _own_rounding(solver: np.ndarray, summands: np.ndarray, y: np.ndarray, epsilon: float) -> np.ndarray:
    """Covariance of the coefficients by the rounding of each element as large as it is: where few elements are much
    larger than the others (an output head's gradient), these decide, and their errors do not average out.

    Args:
        solver: shape (num_directions, num_rows), what turns y into coefficients.
        summands: shape (num_rows, num_directions).
    """
    each = ROUNDING * epsilon * np.maximum(np.abs(y), np.abs(summands).max(axis=1))
    scaled = solver * each
    return np.asarray(scaled @ scaled.T)


def _swallowed(summands: np.ndarray, y: np.ndarray, epsilon: float) -> np.ndarray:
    """How much of each summand may be missing because its elements are less than half a spacing of the sum: that is
    rounding of one sign, which does not average out. Shape (num_directions,), in the summands' unit.

    Args:
        summands: shape (num_rows, num_directions), each of its norm as it was meant.
    """
    spacing = epsilon * np.exp2(np.floor(np.log2(np.maximum(np.abs(y), np.finfo(float).tiny))))
    squares = summands**2
    lost = np.where(np.abs(summands) < 0.5 * spacing[:, None], squares, 0.0).sum(axis=0)
    total = squares.sum(axis=0)
    return np.asarray(np.divide(lost, np.sqrt(total), out=np.zeros_like(total), where=total > 0))


def _off_direction(
    columns: np.ndarray,
    unit: np.ndarray,
    kept: list[int],
    member_of: np.ndarray,
    x: np.ndarray,
    nominal: np.ndarray | None,
) -> np.ndarray:
    """How far columns that count as one direction may take y out of it, each for itself, shape (num_rows, num_columns):
    the bias of two classes gets g and -g, but for rounding in sums that cancelled, which is larger than that of y.

    Args:
        columns, unit: shape (num_rows, num_columns), as they are and of length 1.
        x: shape (num_directions,), what was solved for.
        nominal: shape (num_columns,), coefficients as documented, NaN where unknown.
    """
    along = (unit * unit[:, kept][:, member_of]).sum(axis=0)
    beside = columns - unit[:, kept][:, member_of] * (along * np.linalg.norm(columns, axis=0))
    totals = np.bincount(member_of, np.linalg.norm(columns, axis=0), minlength=len(kept))
    coefficients = np.abs(x / totals)[member_of]
    if nominal is not None:
        coefficients = np.maximum(coefficients, np.abs(np.nan_to_num(nominal)))
    return np.asarray(beside * coefficients)


def _scale(predicted: np.ndarray, meant: np.ndarray, y: np.ndarray) -> float:
    """By how much smaller than documented everything came out (a loss scale, a clip that nobody recorded): rounding
    came out smaller with it. Where the summands cancel, that cannot be told: 1."""
    size = length(predicted)
    if size < CANCELLED * length(meant):
        return 1.0
    return min(1.0, abs(float(predicted @ y)) / size**2) if size else 1.0


def _inverse(gram: np.ndarray) -> np.ndarray | None:
    """The inverse of the products of two unit columns, where these are so far from parallel that solving with it
    is as exact as without; else None."""
    if len(gram) != 2 or not abs(gram[0, 1]) < FAR_APART:
        return None
    (first, product), (_, second) = gram.tolist()
    scale = 1.0 / (first * second - product * product)
    return np.array([[second * scale, -product * scale], [-product * scale, first * scale]])


def _directions(unit: np.ndarray) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Group parallel unit columns: (indices kept, group of each column, its sign)."""
    cosines = unit.T @ unit
    num = unit.shape[1]
    close = np.abs(cosines) > 1 - COLLINEAR
    if close.sum() == num and close.diagonal().all():
        return list(range(num)), np.arange(num), np.ones(num)
    member_of, sign = np.full(num, -1), np.ones(num)
    kept: list[int] = []
    for index in range(num):
        if member_of[index] >= 0:
            continue
        parallel = np.flatnonzero(close[index] & (member_of < 0))
        member_of[parallel] = len(kept)
        sign[parallel] = np.sign(cosines[index, parallel])
        kept.append(index)
    return kept, member_of, sign

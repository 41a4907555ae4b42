"""The weights of a step as arrays: rows are (unit, holder rank), columns contributions. Slices are views of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Weight
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

Row = tuple[str, int]
Key = tuple[int, int, int]

ROW_SLICES = ("units x ranks", "units", "ranks", "parameters", "params x ranks")
"""The last two are made of the grid by parameters (`param_grid`)."""
COLUMN_SLICES = ("contributions", "accumulation steps", "data ranks", "microbatches")
_COLUMN_KEYS: dict[str, Callable[[Key], Hashable]] = {
    "contributions": lambda key: key,
    "accumulation steps": lambda key: key[1],
    "data ranks": lambda key: key[0],
    "microbatches": lambda key: key[2],
}


@dataclass(frozen=True)
class WeightGrid:
    """`values` has shape (4, rows, columns): expected, nominal, observed, ratio; NaN where unknown.

    `documented`: nothing was measured, and the ratio is nominal / expected.
    """

    step: int
    rows: tuple[Row, ...]
    columns: tuple[Key, ...]
    values: np.ndarray
    exact: dict[Key, str]
    tokens: dict[Key, int | None]
    tolerance: float
    documented: bool = False
    _worst: dict[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def distance(self) -> np.ndarray:
        """How far each ratio is from 1, shape (rows, columns): |log2|, infinite for 0, -1 where unknown."""
        ratio = self.values[3]
        with np.errstate(divide="ignore", invalid="ignore"):
            distance: np.ndarray = np.abs(np.log2(np.abs(ratio)))
        distance[np.isnan(ratio)] = -1.0
        return distance

    def column_groups(self, kind: str) -> dict[Hashable, list[int]]:
        """The columns that a kind of slice shows as one, by what they have in common."""
        key = _COLUMN_KEYS[kind]
        return _groups([key(column) for column in self.columns], range(len(self.columns)))

    def worst_columns(self, kind: str) -> np.ndarray:
        """Of each row and group of columns the column that is farthest from 1, shape (rows, groups)."""
        found = self._worst.get(kind)
        if found is None:
            groups = [np.array(group) for group in self.column_groups(kind).values()]
            found = np.stack([group[np.argmax(self.distance[:, group], axis=1)] for group in groups], axis=1)
            self._worst[kind] = found
        return found

    def warm(self) -> None:
        """Find all that slices ask for, in the thread that makes the grid: then a slice costs what is seen of it."""
        if self.rows and self.columns:
            for kind in COLUMN_SLICES[1:]:
                self.worst_columns(kind)


@dataclass(frozen=True)
class Slice:
    """A grid as it is shown. A shown cell stands for the grid cells of its row group and column group; the one that is
    farthest from 1 is shown. It is looked for when the cell is drawn: a slice costs nothing beyond what is seen."""

    grid: WeightGrid
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    row_groups: tuple[tuple[int, ...], ...]
    column_groups: tuple[tuple[int, ...], ...]
    kind: str = COLUMN_SLICES[0]
    _worst: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict, compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.row_groups), len(self.column_groups)

    def at(self, row: int, column: int) -> tuple[int, int]:
        """The grid cell that is shown in a cell of the slice."""
        rows, columns = self.row_groups[row], self.column_groups[column]
        if len(rows) == len(columns) == 1:
            return rows[0], columns[0]
        found = self._worst.get((row, column))
        if found is None:
            if len(columns) == 1:
                worst = list(rows), np.full(len(rows), columns[0])
            else:
                worst = list(rows), self.grid.worst_columns(self.kind)[rows, column]
            at = int(np.argmax(self.grid.distance[worst]))
            found = self._worst[row, column] = (rows[at], int(worst[1][at]))
        return found

    def num_merged(self, row: int, column: int) -> int:
        return len(self.row_groups[row]) * len(self.column_groups[column])

    def cell(self, row: int, column: int) -> tuple[float, float, float, float]:
        """(expected, nominal, observed, ratio) of the cell."""
        expected, nominal, observed, ratio = self.grid.values[(slice(None), *self.at(row, column))].tolist()
        return expected, nominal, observed, ratio

    def ratio(self, row: int, column: int) -> float:
        return float(self.grid.values[(3, *self.at(row, column))])

    def place(self, row: int, column: int) -> tuple[int, int] | None:
        """Where a cell of the grid is shown; None when it is filtered out."""
        down = next((i for i, group in enumerate(self.row_groups) if row in group), None)
        across = next((i for i, group in enumerate(self.column_groups) if column in group), None)
        return (down, across) if down is not None and across is not None else None

    def origin(self, row: int, column: int) -> tuple[Row, Key]:
        at = self.at(row, column)
        return self.grid.rows[at[0]], self.grid.columns[at[1]]


def build_grid(weights: Sequence[Weight], step: int, tolerance: float) -> WeightGrid:
    """The grid of one step by units."""
    entries = []
    for weight in weights:
        if weight.step == step:
            of = weight.contribution
            numbers = (weight.expected, weight.nominal, weight.observed, weight.ratio)
            entries.append(
                Entry(
                    (weight.unit, weight.holder_rank),
                    (of.data_rank, of.accumulation_step, of.microbatch),
                    tuple(np.nan if number is None else number for number in numbers),
                    weight.expected_exact or "",
                    weight.num_tokens,
                    tuple(weight.alike_ranks),
                )
            )
    return fill(entries, step, tolerance)


def param_grid(verdict: StepVerdict, tolerance: float) -> WeightGrid:
    """The grid of one step by single parameters."""
    from gradcheck_dist.diagnosis.steps.units import by_contribution

    entries = [
        Entry(
            (held.param[1] if held.param[0] < 0 else f"stage {held.param[0]}: {held.param[1]}", held.rank),
            cell.key,
            (float(cell.expected), cell.nominal, cell.observed, cell.ratio),
            str(cell.expected),
            verdict.contributions.by_key[cell.key].num_tokens,
            held.alike,
        )
        for held in verdict.held
        for cell in by_contribution(held)
    ]
    return fill(entries, verdict.context.step, tolerance)


class Entry(NamedTuple):
    """One weight: `numbers` are expected, nominal, observed, ratio; `alike` other ranks whose row is the same."""

    row: Row
    key: Key
    numbers: tuple[float, ...]
    exact: str
    num_tokens: int | None
    alike: tuple[int, ...] = ()


def fill(entries: Sequence[Entry], step: int, tolerance: float, *, documented: bool = False) -> WeightGrid:
    """Arrays out of single weights."""
    alike = {entry.row: entry.alike for entry in entries}
    repeated = {(name, other): (name, rank) for (name, rank), ranks in alike.items() for other in ranks}
    rows = sorted({**repeated, **alike})
    columns = sorted({entry.key for entry in entries})
    row_index = {row: index for index, row in enumerate(rows)}
    column_index = {key: index for index, key in enumerate(columns)}
    values = np.full((4, len(rows), len(columns)), np.nan)
    if entries:
        at = [row_index[entry.row] for entry in entries], [column_index[entry.key] for entry in entries]
        values[:, at[0], at[1]] = np.array([entry.numbers for entry in entries], dtype=float).T
    for row, other in repeated.items():
        own = values[:, row_index[row]]
        values[:, row_index[row]] = np.where(np.isnan(own), values[:, row_index[other]], own)
    exact = {entry.key: entry.exact for entry in entries}
    tokens = {entry.key: entry.num_tokens for entry in entries}
    return WeightGrid(step, tuple(rows), tuple(columns), values, exact, tokens, tolerance, documented)


def slice_grid(grid: WeightGrid, rows: str, columns: str, contains: str = "") -> Slice:
    """The grid with rows and columns grouped as named; of a group the cell farthest from 1 is shown."""
    wanted = [i for i, (unit, rank) in enumerate(grid.rows) if contains.lower() in f"{unit} rank {rank}".lower()]
    row_key: Callable[[Row], Hashable] = {
        "units x ranks": lambda row: row,
        "units": lambda row: row[0],
        "ranks": lambda row: row[1],
        "parameters": lambda row: row[0],
        "params x ranks": lambda row: row,
    }[rows]
    several = len({column[2] for column in grid.columns}) > 1
    row_groups = _groups([row_key(grid.rows[i]) for i in wanted], wanted)
    column_groups = grid.column_groups(columns)
    return Slice(
        grid,
        tuple(_row_label(key, rows) for key in row_groups),
        tuple(_column_label(key, columns, several) for key in column_groups),
        tuple(map(tuple, row_groups.values())),
        tuple(map(tuple, column_groups.values())),
        columns,
    )


def worst_cell(grid: WeightGrid) -> tuple[int, int] | None:
    """Row and column of the ratio farthest from 1; None when none is known."""
    ratio = grid.values[3]
    if not ratio.size or np.isnan(ratio).all():
        return None
    smallest, largest = float(np.nanmin(ratio)), float(np.nanmax(ratio))
    worst = smallest if smallest <= 0 or largest * smallest < 1 else largest
    # The first of those that are as bad: which of equals is a rounding error worse tells nothing, nor which nothing.
    as_bad = grid.tolerance * (1.0 if abs(worst) <= grid.tolerance else abs(worst))
    at = int(np.argmax(np.abs(ratio - worst) <= as_bad))
    row, column = divmod(at, ratio.shape[1])
    return row, column


def _groups(keys: Sequence[Hashable], indices: Sequence[int]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for key, index in zip(keys, indices, strict=True):
        groups.setdefault(key, []).append(index)
    return groups


def _row_label(key: Hashable, rows: str) -> str:
    if "x ranks" in rows:
        assert isinstance(key, tuple)
        return f"{key[0]}  rank {key[1]}"
    return f"rank {key}" if rows == "ranks" else str(key)


def _column_label(key: Hashable, columns: str, several: bool) -> str:
    if columns != "contributions":
        letter = {"accumulation steps": "k", "data ranks": "d", "microbatches": "m"}[columns]
        return f"{letter}{key}"
    assert isinstance(key, tuple)
    own = f"k{key[1]}" if key[0] < 0 else f"d{key[0]} k{key[1]}"
    return own + (f" m{key[2]}" if several else "")

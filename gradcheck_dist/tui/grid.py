"""The weights of a step as arrays: rows are (unit, holder rank), columns contributions. Slices are views of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Weight

Row = tuple[str, int]
Key = tuple[int, int, int]

ROW_SLICES = ("units x ranks", "units", "ranks")
COLUMN_SLICES = ("contributions", "accumulation steps", "data ranks", "microbatches")


@dataclass(frozen=True)
class WeightGrid:
    """`values` has shape (4, rows, columns): expected, nominal, observed, ratio; NaN where unknown."""

    step: int
    rows: tuple[Row, ...]
    columns: tuple[Key, ...]
    values: np.ndarray
    exact: dict[Key, str]
    tokens: dict[Key, int | None]
    tolerance: float


@dataclass(frozen=True)
class Slice:
    """A grid as it is shown: labels and, for each shown cell, the grid cell that stands for it (the worst of many)."""

    grid: WeightGrid
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    row_of: np.ndarray
    column_of: np.ndarray
    num_merged: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_of.shape[0], self.row_of.shape[1]

    def cell(self, row: int, column: int) -> tuple[float, float, float, float]:
        """(expected, nominal, observed, ratio) of the cell."""
        values = self.grid.values[:, self.row_of[row, column], self.column_of[row, column]]
        expected, nominal, observed, ratio = values.tolist()
        return expected, nominal, observed, ratio

    def origin(self, row: int, column: int) -> tuple[Row, Key]:
        return self.grid.rows[self.row_of[row, column]], self.grid.columns[self.column_of[row, column]]


def build_grid(weights: Sequence[Weight], step: int, tolerance: float) -> WeightGrid:
    """The grid of one step."""
    of_step = [weight for weight in weights if weight.step == step]
    keys = [
        (w.contribution.data_rank, w.contribution.accumulation_step, w.contribution.microbatch) for w in of_step
    ]
    rows = sorted({(w.unit, w.holder_rank) for w in of_step})
    columns = sorted(set(keys))
    row_index = {row: index for index, row in enumerate(rows)}
    column_index = {key: index for index, key in enumerate(columns)}
    values = np.full((4, len(rows), len(columns)), np.nan)
    exact: dict[Key, str] = {}
    tokens: dict[Key, int | None] = {}
    for weight, key in zip(of_step, keys, strict=True):
        numbers = (weight.expected, weight.nominal, weight.observed, weight.ratio)
        values[:, row_index[weight.unit, weight.holder_rank], column_index[key]] = [
            np.nan if number is None else number for number in numbers
        ]
        exact.setdefault(key, weight.expected_exact or "")
        tokens.setdefault(key, weight.num_tokens)
    return WeightGrid(step, tuple(rows), tuple(columns), values, exact, tokens, tolerance)


def slice_grid(grid: WeightGrid, rows: str, columns: str, contains: str = "") -> Slice:
    """The grid with rows and columns grouped as named; of a group the cell farthest from 1 is shown."""
    wanted = [i for i, (unit, rank) in enumerate(grid.rows) if contains.lower() in f"{unit} rank {rank}".lower()]
    row_key: Callable[[Row], Hashable] = {
        "units x ranks": lambda row: row,
        "units": lambda row: row[0],
        "ranks": lambda row: row[1],
    }[rows]
    column_key: Callable[[Key], Hashable] = {
        "contributions": lambda key: key,
        "accumulation steps": lambda key: key[1],
        "data ranks": lambda key: key[0],
        "microbatches": lambda key: key[2],
    }[columns]
    row_groups = _groups([row_key(grid.rows[i]) for i in wanted], wanted)
    column_groups = _groups([column_key(key) for key in grid.columns], range(len(grid.columns)))
    shape = (len(row_groups), len(column_groups))
    row_of, column_of = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    distance = _distance(grid.values[3])
    for r, members in enumerate(row_groups.values()):
        block = distance[members]
        best = np.argmax(block, axis=0)  # for each grid column the worst of these rows
        worst = block[best, np.arange(block.shape[1])] if block.size else np.zeros(block.shape[1])
        for c, of_column in enumerate(column_groups.values()):
            chosen = of_column[int(np.argmax(worst[of_column]))]
            row_of[r, c], column_of[r, c] = members[int(best[chosen])], chosen
    merged = max((len(group) for group in (*row_groups.values(), *column_groups.values())), default=1)
    return Slice(
        grid,
        tuple(_row_label(key, rows, len(grid.rows)) for key in row_groups),
        tuple(_column_label(key, columns, grid) for key in column_groups),
        row_of,
        column_of,
        merged,
    )


def _groups(keys: Sequence[Hashable], indices: Sequence[int]) -> dict[Hashable, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for key, index in zip(keys, indices, strict=True):
        groups.setdefault(key, []).append(index)
    return groups


def _distance(ratio: np.ndarray) -> np.ndarray:
    """How far from 1: |log2|, infinite for 0, -1 where unknown."""
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.abs(np.log2(np.abs(ratio)))
    distance[np.isnan(ratio)] = -1.0
    return distance


def _row_label(key: Hashable, rows: str, num_rows: int) -> str:
    if rows == "units x ranks":
        assert isinstance(key, tuple)
        return f"{key[0]}  rank {key[1]}"
    return f"rank {key}" if rows == "ranks" else str(key)


def _column_label(key: Hashable, columns: str, grid: WeightGrid) -> str:
    if columns != "contributions":
        letter = {"accumulation steps": "k", "data ranks": "d", "microbatches": "m"}[columns]
        return f"{letter}{key}"
    assert isinstance(key, tuple)
    several = len({column[2] for column in grid.columns}) > 1
    return f"d{key[0]} k{key[1]}" + (f" m{key[2]}" if several else "")

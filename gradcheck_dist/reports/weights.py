"""The weight table: what each contribution weighs in the gradient, as data rank x accumulation step."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gradcheck_dist.diagnosis.finding import Report, Weight
from gradcheck_dist.reports.text import number, some, spans
from gradcheck_dist.wording import plural

MAX_TABLES = 3
MAX_ROWS = 12
MAX_COLUMNS = 6
READ_AS_ONE = 0.1
NOISE = 3.0
"""Standard errors up to which a weight is as good as none."""

T = TypeVar("T")
Contribution = tuple[int, int, int]


@dataclass(frozen=True)
class Cell:
    """One contribution's weight: expected and observed in 1/tokens, their ratio."""

    expected: str
    observed: str
    ratio: str
    off: bool


@dataclass(frozen=True)
class WeightTable:
    """Columns are accumulation steps; a row is a data rank, or one of its microbatches."""

    caption: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


@dataclass
class _Group:
    """Holders of units whose ratios agree."""

    ratios: dict[Contribution, float | None]
    members: list[tuple[str, int]] = field(default_factory=list)
    weights: dict[Contribution, list[Weight]] = field(default_factory=lambda: defaultdict(list))

    def add(self, member: tuple[str, int], weights: dict[Contribution, Weight]) -> None:
        self.members.append(member)
        for contribution, weight in weights.items():
            self.weights[contribution].append(weight)

    @property
    def deviation(self) -> float:
        return max((abs(ratio - 1) for ratio in self.ratios.values() if ratio is not None), default=-1.0)


def shown_step(report: Report) -> int | None:
    """The step whose weights are shown: that of the first finding, which is the headline, else the first recorded."""
    steps = {weight.step for weight in report.weights}
    return next((one.step for one in report.findings if one.step in steps), min(steps, default=None))


def tolerance(report: Report) -> float:
    """How far two ratios may lie apart and still read as the same: one badly known weight does not blur all others."""
    return min(max(3 * (report.tolerance or 0.0), 1e-4), READ_AS_ONE)


def weight_tables(report: Report) -> tuple[list[WeightTable], int]:
    """One table for each set of parameters with the same weights, worst first, and how many tables were left out."""
    step = shown_step(report)
    groups = _group([weight for weight in report.weights if weight.step == step], tolerance(report))
    groups.sort(key=lambda group: -group.deviation)
    sizes = {unit.unit: len(unit.parameters) for unit in report.units}
    tables = [_table(group, report, step or 0, sizes, len(groups) == 1) for group in groups[:MAX_TABLES]]
    return tables, max(0, len(groups) - MAX_TABLES)


def _group(weights: Iterable[Weight], same: float) -> list[_Group]:
    holders: dict[tuple[str, int], dict[Contribution, Weight]] = defaultdict(dict)
    for weight in weights:
        key = weight.contribution
        holders[weight.unit, weight.holder_rank][key.data_rank, key.accumulation_step, key.microbatch] = weight
    groups: list[_Group] = []
    for member, cells in sorted(holders.items(), key=lambda item: -len(item[1])):
        ratios = {contribution: _measured(weight, weight.ratio) for contribution, weight in cells.items()}
        group = next((group for group in groups if _agree(ratios, group.ratios, same)), None)
        if group is None:
            group = _Group(ratios)
            groups.append(group)
        group.add(member, cells)
    return groups


def _agree(part: dict[Contribution, float | None], whole: dict[Contribution, float | None], same: float) -> bool:
    """Whether one that knows some of another's contributions knows the same of them."""
    if not part.keys() <= whole.keys():
        return False
    for contribution, ratio in part.items():
        other = whole[contribution]
        if ratio is None or other is None:
            if ratio is not other:
                return False
        elif abs(ratio - other) > same * max(abs(ratio), abs(other), 1.0):
            return False
    return True


def _table(group: _Group, report: Report, step: int, sizes: dict[str, int], alone: bool) -> WeightTable:
    keys = sorted(group.weights)
    num_microbatches = len({microbatch for _, _, microbatch in keys})
    rows = sorted({(rank, microbatch) for rank, _, microbatch in keys})
    columns = sorted({accumulation for _, accumulation, _ in keys})
    lines: list[tuple[str, tuple[Cell, ...]]] = []
    shown_columns = _elide(columns, MAX_COLUMNS)
    for row in _elide(rows, MAX_ROWS):
        if row is None:
            lines.append(("…", tuple(Cell("…", "…", "…", False) for _ in shown_columns)))
            continue
        rank, microbatch = row
        label = f"data rank {rank}" + (f" m={microbatch}" if num_microbatches > 1 else "")
        cells = (
            _cell([] if column is None else group.weights.get((rank, column, microbatch), []), column, report)
            for column in shown_columns
        )
        lines.append((label, tuple(cells)))
    labels = tuple("…" if column is None else f"k={column}" for column in shown_columns)
    return WeightTable(_caption(group, step, sizes, alone), _note(group, len(keys), report), labels, tuple(lines))


def _elide(items: Sequence[T], limit: int) -> list[T | None]:
    if len(items) <= limit:
        return list(items)
    head = limit // 2
    return [*items[:head], None, *items[len(items) - (limit - head - 1) :]]


def _cell(weights: list[Weight], column: int | None, report: Report) -> Cell:
    if column is None:
        return Cell("…", "…", "…", False)
    if not weights:
        return Cell("-", "-", "-", False)
    first = weights[0]
    exact = first.expected_exact
    expected = exact if exact and len(exact) <= 10 else number(first.expected)
    observed = [value for weight in weights if (value := _measured(weight, weight.observed)) is not None]
    ratios = [value for weight in weights if (value := _measured(weight, weight.ratio)) is not None]
    ratio = statistics.median(ratios) if ratios else None
    off = ratio is not None and abs(ratio - 1) > tolerance(report)
    return Cell(expected, number(statistics.median(observed) if observed else None), number(ratio), off)


def _measured(weight: Weight, value: float | None) -> float | None:
    """What was observed of a weight, 0 where that is noise."""
    is_noise = weight.observed is not None and abs(weight.observed) <= NOISE * (weight.stderr or 0.0)
    return 0.0 if is_noise and value is not None else value


def _caption(group: _Group, step: int, sizes: dict[str, int], alone: bool) -> str:
    units = list(dict.fromkeys(unit for unit, _ in group.members))
    num_parameters = sum(sizes.get(unit, 1) for unit in units)
    parameters = plural(num_parameters, "parameter")
    ranks = spans(rank for members in group.weights.values() for one in members for rank in one.ranks)
    which = some(units) if num_parameters == 1 else f"{some(units)} ({parameters})"
    if alone:
        which = f"all {parameters}" if parameters != "1 parameter" else "its parameter"
    holders = "rank" if ranks.isdigit() else "ranks"
    relative = all(weight.expected is None for weights in group.weights.values() for weight in weights)
    what = (
        "Weight of each contribution's own gradient in" if relative else "Weight of one token's loss in the gradient of"
    )
    return f"{what} step {step}: {which}, held by {holders} {ranks}"


def _note(group: _Group, num_contributions: int, report: Report) -> str:
    ratios = [ratio for ratio in group.ratios.values() if ratio is not None]
    if not ratios:
        return f"none of {plural(num_contributions, 'contribution')} could be identified"
    low, high = min(ratios), max(ratios)
    if abs(high - low) <= tolerance(report) * max(abs(high), 1.0):
        return f"ratio {number(statistics.median(ratios))} for {plural(num_contributions, 'contribution')}"
    return f"ratio from {number(low)} to {number(high)} over {plural(num_contributions, 'contribution')}"

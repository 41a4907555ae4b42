"""Two runs' facts and weights side by side; what differs is marked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.reports.text import spans
from gradcheck_dist.tui import scale
from gradcheck_dist.tui.grid import Key, WeightGrid
from gradcheck_dist.tui.widgets.rows import Piece, Rows, fit, middle


@dataclass(frozen=True)
class Line:
    """One row: what, left, right; `ratios` when both sides are ratios."""

    label: str
    left: str
    right: str
    differs: bool
    ratios: tuple[float, float] | None = None


class CompareRows(Rows):
    """Facts first, then weights."""

    header_rows = 1
    _lines: list[Line] = []
    only_differences = False
    tolerance = 1e-4

    def show(self, lines: list[Line], tolerance: float) -> None:
        self.tolerance = tolerance
        self._lines = [line for line in lines if line.differs] if self.only_differences else lines
        self.count = len(self._lines)
        self.refresh()

    def _widths(self) -> tuple[int, int]:
        side = max(10, min(30, (self.size.width - 24) // 3))
        return self.size.width - 2 * side - 6, side

    def header(self, row: int) -> Iterable[Piece]:
        label, side = self._widths()
        yield f"  {fit('', label)} {fit('this run', side)} {fit('other run', side)}", "head"

    def pieces(self, index: int) -> Iterable[Piece]:
        line, (label, side) = self._lines[index], self._widths()
        yield "≠ " if line.differs else "  ", "bad"
        yield middle(line.label, label) + " ", "bold" if line.differs else "plain"
        if line.ratios is None:
            look = "bold" if line.differs else "dim"
            yield f"{fit(line.left, side)} {fit(line.right, side)}", look
            return
        for ratio in line.ratios:
            right = abs(ratio - 1) <= self.tolerance
            yield fit(f" {scale.sign(ratio, right)} {scale.short(ratio)}", 10), scale.style(ratio, right)
            yield " " * (side - 9), "plain"

    def empty(self) -> str:
        return "nothing differs" if self.only_differences else "nothing to compare"


def compare(left: Report, right: Report, left_grid: WeightGrid | None, right_grid: WeightGrid | None) -> list[Line]:
    """Facts of both runs, then every weight that either has."""
    lines = [Line(name, a, b, a != b) for name, a, b in _facts(left, right) if (a, b) != ("-", "-")]
    tolerance = max((grid.tolerance for grid in (left_grid, right_grid) if grid is not None), default=1e-4)
    mine, other = _ratios(left_grid), _ratios(right_grid)
    alike: dict[tuple[int, Key, str, str], list[tuple[str, float, float]]] = {}
    for rank, key, param in sorted({*mine, *other}):
        a, b = mine.get((rank, key, param), math.nan), other.get((rank, key, param), math.nan)
        alike.setdefault((rank, key, scale.short(a), scale.short(b)), []).append((param, a, b))
    num_params = len({param for _, _, param in {*mine, *other}})
    for (holder, (d, k, m), _, _), members in alike.items():
        param, a, b = members[0]
        both = math.isnan(a) and math.isnan(b)
        same = both or abs(a - b) <= tolerance * max(abs(a), abs(b), 1.0)
        which = "all parameters" if len(members) == num_params else param
        more = f" and {len(members) - 1} more" if which == param and len(members) > 1 else ""
        lines.append(
            Line(f"rank {holder} d{d} k{k} m{m}  {which}{more}", scale.short(a), scale.short(b), not same, (a, b))
        )
    return lines


def _facts(left: Report, right: Report) -> Iterable[tuple[str, str, str]]:
    yield "verdict", left.verdict, right.verdict
    yield "findings", _findings(left), _findings(right)
    for name in ("scenario", "variant", "world_size", "dtype", "objective", "torch_version", "device_type"):
        yield name.replace("_", " "), str(getattr(left.run, name) or "-"), str(getattr(right.run, name) or "-")
    for axis in {**left.run.axes, **right.run.axes}:
        a, b = left.run.axes.get(axis, 1), right.run.axes.get(axis, 1)
        if a > 1 or b > 1:
            yield axis, str(a), str(b)
    yield "steps", spans(left.run.steps) or "-", spans(right.run.steps) or "-"
    for name in ("num_tokens", "loss", "grad_norm"):
        first, second = (_first(report.metrics.get(name, [])) for report in (left, right))
        yield f"{name.replace('_', ' ')}, first step", first, second


def _first(values: Sequence[float | None]) -> str:
    return f"{values[0]:.6g}" if values and values[0] is not None else "-"


def _findings(report: Report) -> str:
    return (
        ", ".join(f"{finding.code} {finding.factor.expression or ''}".strip() for finding in report.findings) or "none"
    )


def _ratios(grid: WeightGrid | None) -> dict[tuple[int, Key, str], float]:
    """By holder rank, contribution and parameter: units are called differently in runs that differ."""
    if grid is None:
        return {}
    found = {}
    for r, c in np.argwhere(~np.isnan(grid.values[3])).tolist():
        param, rank = grid.rows[r]
        found[rank, grid.columns[c], param] = float(grid.values[3, r, c])
    return found

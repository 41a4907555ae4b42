"""Figures of a report as plain plotly specifications: made without plotly, for HTML report and notebook alike."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradcheck_dist.diagnosis.finding import Report, Weight
from gradcheck_dist.reports.along import Place, contribution_places, known_weights, mesh_places
from gradcheck_dist.reports.figure import COLOURS, Figure, bins, distinct, label, layout
from gradcheck_dist.reports.text import number, printable
from gradcheck_dist.reports.weights import shown_step
from gradcheck_dist.wording import plural

MAX_ROWS = 48
MAX_COLUMNS = 64
MAX_POINTS = 2000
_RIGHT = {
    "type": "line",
    "xref": "paper",
    "x0": 0,
    "x1": 1,
    "y0": 1,
    "y1": 1,
    "line": {"dash": "dot", "color": "#6b7280"},
}
_OCTAVES = 12
"""As far as colours go; what is farther off, as a weight of 0, counts as this far."""
_DIVERGING = [[0.0, "#2a6fb0"], [0.5, "#f4f4f2"], [1.0, "#c4541c"]]


def weights_figure(report: Report, step: int | None = None) -> Figure | None:
    """Ratio of each holder's weight for each contribution in a step, by default the shown one; None without weights."""
    step = shown_step(report) if step is None else step
    weights = [weight for weight in report.weights if weight.step == step]
    if not weights:
        return None
    rows: list[Any] = list(dict.fromkeys(_row(weight) for weight in weights))
    columns: list[Any] = sorted({_column(weight) for weight in weights})
    row_bins, column_bins = bins(rows, MAX_ROWS), bins(columns, MAX_COLUMNS)
    several = len({column[2] for column in columns}) > 1
    worst_cells = _worst_cells(weights, row_bins, column_bins)
    z = [[None if weight is None else _log2(weight.ratio) for weight in worst] for worst in worst_cells]
    hover = [[_cell_text(weight) for weight in worst] for worst in worst_cells]
    names = [_bin_label(row_bin, lambda row: f"{row[0]} @ rank {row[1]}") for row_bin in row_bins]
    tops = [_bin_label(cols, lambda c: f"d{c[0]} k{c[1]}" + (f" m{c[2]}" if several else "")) for cols in column_bins]
    # What weighs nothing has the last colour, however few octaves the others need.
    limit = max([0.5, *(abs(value) for line in z for value in line if value is not None and value > -_OCTAVES)])
    heat = {
        "type": "heatmap",
        "z": z,
        "x": distinct(tops),
        "y": distinct(names),
        "hovertext": hover,
        "hovertemplate": "%{y}<br>%{x}<br>%{hovertext}<extra></extra>",
        "colorscale": _DIVERGING,
        "zmin": -limit,
        "zmax": limit,
        "xgap": 1,
        "ygap": 1,
        **({"texttemplate": "%{text}", "text": _ratios(worst_cells)} if len(column_bins) <= 12 else {}),
        "colorbar": {"title": {"text": "log2 ratio", "side": "right"}, "thickness": 12, "len": 1},
    }
    note = ""
    if len(row_bins) < len(rows) or len(column_bins) < len(columns):
        note = (
            f"{len(rows)} holders x {plural(len(columns), 'contribution')} reduced to {len(row_bins)} x "
            f"{len(column_bins)}: each cell shows the weight that is farthest off among those that it stands for."
        )
    ratios = [weight.ratio for weight in weights if weight.ratio is not None]
    seen = f"from {number(min(ratios))} to {number(max(ratios))}" if ratios else "unknown"
    return Figure(
        "weights",
        f"Weights of step {step}: observed / expected",
        f"{plural(len(rows), 'holder')} by {plural(len(columns), 'contribution')}, ratios {seen}; white is right.",
        {
            "data": [heat],
            "layout": layout(
                "contribution: data rank d, step k",
                "",
                24 * len(row_bins) + (220 if len(column_bins) > 12 else 170),
                xaxis={"type": "category"},
                yaxis={"type": "category", "autorange": "reversed"},
            ),
        },
        note,
    )


def _row(weight: Weight) -> tuple[str, int]:
    return weight.unit, weight.holder_rank


def _column(weight: Weight) -> tuple[int, int, int]:
    key = weight.contribution
    return key.data_rank, key.accumulation_step, key.microbatch


def _worst_cells(
    weights: Iterable[Weight], row_bins: Sequence[Sequence[Any]], column_bins: Sequence[Sequence[Any]]
) -> list[list[Weight | None]]:
    """For each pair of bins the weight that is farthest off, None where there is none."""
    row_of = {row: index for index, some in enumerate(row_bins) for row in some}
    column_of = {column: index for index, some in enumerate(column_bins) for column in some}
    binned: dict[tuple[int, int], list[Weight]] = defaultdict(list)
    for weight in weights:
        binned[row_of[_row(weight)], column_of[_column(weight)]].append(weight)
    return [
        [_worst(binned.get((row, column), ())) for column in range(len(column_bins))] for row in range(len(row_bins))
    ]


def ratio_figure(report: Report) -> Figure | None:
    """Median ratio (bar: lowest to highest) along every axis of the mesh, the contributions and the steps."""
    along: dict[str, Place] = {"step": lambda weight: weight.step}
    along |= {name.replace("_", " "): place for name, place in contribution_places().items()}
    along |= mesh_places(report)
    known = known_weights(report)
    traces: list[dict[str, Any]] = []
    reduced: list[str] = []
    for name, place in along.items():
        groups: dict[int, list[float]] = defaultdict(list)
        for weight in known:
            groups[place(weight)].append(weight.ratio or 0.0)
        if len(groups) < 2:
            continue
        held = bins(sorted(groups), MAX_ROWS)
        if len(held) < len(groups):
            reduced.append(f"{name} ({len(groups)} to {len(held)})")
        joined = [[ratio for one in some for ratio in groups[one]] for some in held]
        traces.append(_trace(name, [_bin_label(some, str) for some in held], joined, COLOURS[len(traces) % 8]))
    if not traces:
        return None
    return Figure(
        "ratio",
        "Ratio along each axis",
        f"Median of observed / expected along {', '.join(trace['name'] for trace in traces)}; 1 is right.",
        {
            "data": traces,
            "layout": layout(
                "axis, coordinate",
                "observed / expected",
                360,
                xaxis={"type": "multicategory"},
                yaxis={"range": _range(known)},
                shapes=[_RIGHT],
            ),
        },
        f"Neighbouring coordinates are taken together along {', '.join(reduced)}." if reduced else "",
    )


def norms_figure(report: Report) -> Figure | None:
    """Metrics by step; None unless several steps were recorded."""
    traces: list[dict[str, Any]] = []
    notes: list[str] = []
    order = ("grad_norm", "loss", "num_tokens")
    names = [*(name for name in order if name in report.metrics), *sorted(set(report.metrics) - set(order))][:6]
    for name in names:
        pairs = report.series(name)
        values, at = [value for _, value in pairs], [step for step, _ in pairs]
        if len(values) < 2:
            continue
        kept = bins(list(range(len(values))), MAX_POINTS)
        if len(kept) < len(values):
            notes.append(f"{printable(name, 40)}: one in every {len(kept[0])} of {len(values)} values")
        chosen = [some[0] for some in kept]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(chosen) < 60 else "lines",
                "name": label(name),
                "x": [at[index] for index in chosen],
                "y": [values[index] for index in chosen],
                "yaxis": f"y{len(traces) + 1}" if traces else "y",
                "line": {"color": COLOURS[len(traces)]},
            }
        )
    if not traces:
        return None
    told = ", ".join(trace["name"] for trace in traces)
    return Figure("norms", "Norm, loss and tokens by step", f"{told} by step.", _stacked(traces), "; ".join(notes))


def _stacked(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """One panel a trace, one below the other, over a common x axis."""
    count = len(traces)
    shape = layout("optimizer step", "", 140 + 130 * count, showlegend=False)
    style = shape.pop("yaxis")
    for index, trace in enumerate(traces):
        top = 1 - index / count
        domain = [max(0.0, top - 0.86 / count), top]
        shape[f"yaxis{index + 1}" if index else "yaxis"] = {**style, "domain": domain, "title": {"text": trace["name"]}}
    shape["xaxis"]["anchor"] = f"y{count}" if count > 1 else "y"
    steps = [step for trace in traces for step in trace["x"]]
    if max(steps) - min(steps) <= 10:  # half a step would be marked else
        shape["xaxis"]["dtick"] = 1
    return {"data": traces, "layout": shape}


def _trace(name: str, places: list[str], groups: list[list[float]], colour: str) -> dict[str, Any]:
    middle = [statistics.median(group) for group in groups]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [[name] * len(places), distinct(places)],
        "y": middle,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [max(group) - value for group, value in zip(groups, middle, strict=True)],
            "arrayminus": [value - min(group) for group, value in zip(groups, middle, strict=True)],
        },
        "line": {"color": colour},
    }


def _worst(weights: Iterable[Weight]) -> Weight | None:
    return max(weights, key=lambda weight: -1.0 if weight.ratio is None else abs(weight.ratio - 1), default=None)


def _range(weights: Iterable[Weight]) -> list[float]:
    """From the lowest to the highest ratio, 1 always among them: rounding must not fill the picture."""
    ratios = [1.0, *(weight.ratio for weight in weights if weight.ratio is not None and math.isfinite(weight.ratio))]
    margin = max(0.08 * (max(ratios) - min(ratios)), 0.02)
    return [min(ratios) - margin, max(ratios) + margin]


def _ratios(rows: list[list[Weight | None]]) -> list[list[str]]:
    return [["" if weight is None else number(weight.ratio, 4) for weight in row] for row in rows]


def _log2(ratio: float | None) -> float | None:
    if ratio is None or math.isnan(ratio):
        return None
    return math.log2(min(max(abs(ratio), 2.0**-_OCTAVES), 2.0**_OCTAVES))


def _cell_text(weight: Weight | None) -> str:
    if weight is None:
        return "no such contribution"
    expected = weight.expected_exact or number(weight.expected)
    return f"ratio {number(weight.ratio)}: {number(weight.observed)} of {label(expected)}"


def _bin_label(some: Sequence[Any], name: Callable[[Any], str]) -> str:
    return label(name(some[0])) if len(some) == 1 else f"{label(name(some[0]))} … {label(name(some[-1]))}"

"""The gradient norms of a study as one small SVG that a README can show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from gradcheck_dist.reports.figure import COLOURS
from gradcheck_dist.scenarios.study import Result

WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 34, 44
MAX_POINTS = 120


def as_svg(result: Result) -> str:
    """Norm before clipping by step on a logarithmic scale, a curve a strategy; equal curves lie on one another."""
    curves = {source.name: source.curves["grad_norm"] for source in result.comparison.sources}
    values = [value for curve in curves.values() for value in curve.values() if value > 0]
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    last = max(max(curve) for curve in curves.values()) or 1

    def place(step: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(value)) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t">',
        f'<title id="t">Gradient norm by step of {escape(", ".join(curves))}.</title>',
        "<style>text{font:13px system-ui,sans-serif;fill:#374151}.axis{stroke:#9ca3af}path{fill:none}"
        "@media (prefers-color-scheme:dark){text{fill:#d1d5db}}</style>",
        f'<text x="{LEFT}" y="18">gradient norm before clipping, by optimizer step</text>',
    ]
    for tick in _ticks(low, high):
        height = place(0, tick).split(",")[1]
        parts.append(f'<path class="axis" d="M{LEFT} {height}H{WIDTH - RIGHT}" stroke-width=".5"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height}" dy="4" text-anchor="end">{tick:g}</text>')
    for step in range(0, last + 1, int(round(last / 5, -1)) or 1):
        x = place(step, values[0]).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 18}" text-anchor="middle">{step}</text>')
    for index, (name, curve) in enumerate(curves.items()):
        # The control first and broad, so that it shows below those that lie on it.
        colour, width = ("#9ca3af", 6) if index == 0 else (COLOURS[(index - 1) % len(COLOURS)], 1.4)
        points = " ".join(place(step, value) for step, value in _thinned(curve).items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        y = TOP + 14 + 20 * index
        parts.append(f'<path d="M{WIDTH - RIGHT + 14} {y - 4}h22" stroke="{colour}" stroke-width="{max(width, 2)}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 42}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _thinned(curve: Mapping[int, float]) -> dict[int, float]:
    """Every n-th point: a picture of some hundred pixels shows no more."""
    stride = -(-len(curve) // MAX_POINTS)
    return {
        step: value for index, (step, value) in enumerate(sorted(curve.items())) if index % stride == 0 and value > 0
    }


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= math.log10(tick) <= high]

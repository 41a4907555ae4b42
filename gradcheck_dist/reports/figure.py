"""What all figures share: a plain plotly specification, labels in which nothing is markup, one look.

Labels may come from a stranger's trace, and plotly reads tags in them: `label` takes their meaning away.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradcheck_dist.reports.text import printable

COLOURS = ("#2a6fb0", "#c4541c", "#3d8b4f", "#8457a6", "#8c6d1f", "#43868c", "#a8326e", "#6b7280")


@dataclass(frozen=True)
class Figure:
    """`spec` is what Plotly.newPlot takes; `summary` says in words what is seen, `note` what was reduced."""

    name: str
    title: str
    summary: str
    spec: dict[str, Any]
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", _finite(self.spec))


def _finite(value: Any) -> Any:
    """NaN and infinity, as a run that diverged leaves them, are gaps: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def label(name: str, limit: int = 40) -> str:
    """A name as an axis label or hover text of plotly in which nothing is markup."""
    return html.escape(printable(name, limit), quote=False)


def layout(x: str, y: str, height: int = 320, **more: Any) -> dict[str, Any]:
    """The look that all figures share."""
    base: dict[str, Any] = {
        "height": height,
        "margin": {"l": 60, "r": 16, "t": 16, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#6b7280"},
        "hoverlabel": {"namelength": -1},
        "xaxis": {"title": {"text": x}, "automargin": True, "gridcolor": "rgba(128,128,128,0.2)", "zeroline": False},
        "yaxis": {"title": {"text": y}, "automargin": True, "gridcolor": "rgba(128,128,128,0.2)", "zeroline": False},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    for key, value in more.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) and isinstance(value, dict) else value
    return base


def bins(items: Sequence[Any], limit: int) -> list[list[Any]]:
    """Neighbours taken together so that at most `limit` groups are left."""
    size = max(1, -(-len(items) // limit))
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def distinct(labels: Sequence[str]) -> list[str]:
    """Plotly draws equal categories into one place: number what was cut down to the same words."""
    count: dict[str, int] = defaultdict(int)
    result = []
    for text in labels:
        count[text] += 1
        result.append(text if count[text] == 1 else f"{text} ({count[text]})")
    return result

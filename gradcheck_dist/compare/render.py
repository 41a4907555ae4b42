"""A comparison as text, Markdown, JSON and a page with its curves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from gradcheck_dist import __version__
from gradcheck_dist.compare.comparison import WORDS, Comparison, Metric
from gradcheck_dist.reports import markdown
from gradcheck_dist.reports.figure import COLOURS, Figure, bins, label, layout
from gradcheck_dist.reports.page import PlotlyJs, escape, figure_html, page, prose_html
from gradcheck_dist.reports.plain import paragraph
from gradcheck_dist.reports.text import number
from gradcheck_dist.wording import plural

HEADS = ("test", "quantity", "points", "ratio", "what it says")
MAX_POINTS = 1500
_SIGNS = {"clean": "✅", "findings": "❌", "undetermined": "⚠️"}
_STATES = {0: "clean", 1: "findings", 2: "undetermined"}


def band(metric: Metric) -> str:
    """0.2502 +- 0.0009: the ratio with half of its 95 % band, as many digits as that allows."""
    if metric.ratio is None:
        return "-"
    value, half = metric.ratio.value, metric.ratio.value * metric.ratio.half
    if not math.isfinite(half) or half < 5e-7:
        return number(value, 6)
    digits = min(max(-math.floor(math.log10(half)), 0), 6)
    return f"{value:.{digits}f} +- {half:.{digits}f}" if digits else f"{number(value, 4)} +- {number(half, 2)}"


def headline(comparison: Comparison) -> str:
    """One sentence about all tests."""
    off = [test.name for test in comparison.tests if test.state == "findings"]
    if off:
        return (
            f"{len(off)} of {plural(len(comparison.tests), 'test')} off against {comparison.control}: {', '.join(off)}"
        )
    open_ = [test.name for test in comparison.tests if test.state == "undetermined"]
    if open_:
        return f"COULD NOT COMPARE {', '.join(open_)} with {comparison.control}"
    return f"SAME: {plural(len(comparison.tests), 'test')} and {comparison.control} coincide"


def _rows(comparison: Comparison) -> list[tuple[str, ...]]:
    return [
        (
            test.name,
            WORDS[metric.role],
            str(metric.ratio.num_points if metric.ratio else len(metric.aligned.at)),
            band(metric),
            metric.text,
        )
        for test in comparison.tests
        for metric in test.metrics
    ]


def as_text(comparison: Comparison) -> str:
    """For a terminal: at most 100 columns."""
    lines = [*paragraph(headline(comparison)), f"  ratio = test / control, by {comparison.by}, 95 % band"]
    for test in comparison.tests:
        lines += ["", test.name]
        for metric in test.metrics:
            points = metric.ratio.num_points if metric.ratio else len(metric.aligned.at)
            head = f"{WORDS[metric.role]:<14} {band(metric):<22} ({plural(points, 'point')})"
            lines += paragraph(f"{head}  {metric.text}", "  ")
        for note in test.notes:
            lines += paragraph(note, "  ")
    return "\n".join(lines) + "\n"


def as_markdown(comparison: Comparison) -> str:
    """For a pull request."""
    text = markdown.text
    sign = _SIGNS[_STATES[comparison.exit_code]]
    rows = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    rows += ["| " + " | ".join(text(cell) for cell in row) + " |" for row in _rows(comparison)]
    notes = [f"{test.name}: {note}" for test in comparison.tests for note in test.notes]
    parts = [markdown.MARK, f"### {sign} gradcheck compare: {text(headline(comparison))}", "\n".join(rows)]
    parts += [markdown.bullets(notes)] if notes else []
    parts.append(f"<sub>ratio = test / control, aligned by {comparison.by}, 95 % band; gradcheck {__version__}</sub>")
    return markdown.fit(parts, markdown.MAX_BYTES)


def as_json(comparison: Comparison) -> str:
    """For scripts."""
    tests = [
        {
            "name": test.name,
            "state": test.state,
            "notes": list(test.notes),
            "metrics": [_metric_json(metric) for metric in test.metrics],
        }
        for test in comparison.tests
    ]
    content = {"control": comparison.control, "by": comparison.by, "axes": dict(comparison.axes), "tests": tests}
    return json.dumps(content, indent=1) + "\n"


def _metric_json(metric: Metric) -> dict[str, Any]:
    content: dict[str, Any] = {"quantity": metric.role, "state": metric.state, "text": metric.text}
    if metric.ratio is not None:
        found = metric.ratio
        content |= {
            "ratio": found.value,
            "relative_half_width": found.half,
            "num_points": found.num_points,
            "num_outliers": found.num_outliers,
            "relative_drift": found.drift,
            "start": found.start,
        }
    return content | {"explanations": [{"expression": one.expression, "value": one.value} for one in metric.names]}


def as_html(comparison: Comparison, plotlyjs: PlotlyJs = "inline", sections: Sequence[str] = ()) -> str:
    """A page: the table and, for each quantity, the curves above their ratio; `sections` is HTML behind the verdict."""
    figures = [figure for role in ("grad_norm", "loss") if (figure := _figure(comparison, role)) is not None]
    head = "".join(f'<th scope="col">{name}</th>' for name in HEADS[1:])
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{prose_html(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in _rows(comparison)
    )
    notes = "".join(
        f"<li>{escape(test.name)}: {prose_html(note)}</li>" for test in comparison.tests for note in test.notes
    )
    state = _STATES[comparison.exit_code]
    body = [
        f'<section class="verdict {state}"><h1>{prose_html(headline(comparison))}</h1><ul>{notes}</ul></section>',
        *sections,
        '<div class="scroll" tabindex="0" role="region" aria-label="ratios"><table class="words">'
        f"<caption>ratio = test / control, aligned by {comparison.by}, 95 % band</caption>"
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>",
        *(figure_html(figure, figure.name) for figure in figures),
        f'<footer class="soft">gradcheck {escape(__version__)}</footer>',
    ]
    return page(f"gradcheck compare: {headline(comparison)}", body, figures, plotlyjs)


def _figure(comparison: Comparison, role: str) -> Figure | None:
    traces: list[dict[str, Any]] = []
    reduced = False
    for index, test in enumerate(comparison.tests):
        metric = next((one for one in test.metrics if one.role == role and len(one.aligned.at)), None)
        if metric is None:
            continue
        pieces = bins(range(len(metric.aligned.at)), MAX_POINTS)
        kept = [piece[0] for piece in pieces]
        reduced |= len(kept) < len(metric.aligned.at)
        at = metric.aligned.at[kept].tolist()
        control, values = metric.aligned.control[kept], metric.aligned.test[kept]
        if not traces:
            traces.append(_curve(comparison.control, at, control.tolist(), "#6b7280", "y"))
        colour = COLOURS[index % len(COLOURS)]
        traces.append(_curve(test.name, at, values.tolist(), colour, "y"))
        traces.append({**_curve(test.name, at, (values / control).tolist(), colour, "y2"), "showlegend": False})
    if not traces:
        return None
    unit = "optimizer step" if comparison.by == "step" else "tokens"
    shape = layout(unit, WORDS[role], 460, xaxis={"anchor": "y2"})
    scale = {"type": "log"} if role == "grad_norm" else {}
    style = shape["yaxis"]
    shape["yaxis"] = {**style, **scale, "domain": [0.44, 1.0]}
    shape["yaxis2"] = {**style, **scale, "domain": [0.0, 0.36], "title": {"text": "ratio"}}
    told = "; ".join(
        f"{test.name} {band(metric)}" for test in comparison.tests for metric in test.metrics if metric.role == role
    )
    note = f"At most {MAX_POINTS} points a curve are drawn." if reduced else ""
    return Figure(
        role,
        WORDS[role].capitalize(),
        f"Ratio to {comparison.control}: {told}.",
        {"data": traces, "layout": shape},
        note,
    )


def _curve(name: str, at: list[float], values: list[float], colour: str, axis: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines" if len(at) > 40 else "lines+markers",
        "name": label(name),
        "x": at,
        "y": values,
        "yaxis": axis,
        "line": {"color": colour, "width": 1.5},
    }

"""A study as text, Markdown, JSON and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from gradcheck_dist import __version__
from gradcheck_dist.compare import render
from gradcheck_dist.compare.comparison import Test
from gradcheck_dist.reports import markdown
from gradcheck_dist.reports.page import escape
from gradcheck_dist.reports.text import number
from gradcheck_dist.scenarios.study import Outcome, Result

HEADS = (
    "strategy",
    "layout",
    "norm of step 0",
    "norm / control",
    "loss / control",
    "last loss",
    "its first step, recorded",
    "seconds",
)


def rows(result: Result) -> list[tuple[str, ...]]:
    """A row a strategy, the control first; ratios are means over all steps with their 95 % band."""
    tests: dict[str, Test] = {test.name: test for test in result.comparison.tests}
    return [_row(outcome, tests.get(outcome.name)) for outcome in result.outcomes]


def _row(outcome: Outcome, test: Test | None) -> tuple[str, ...]:
    metrics = {metric.role: metric for metric in test.metrics} if test else {}
    ratios = [render.band(metrics[role]) if role in metrics else "-" for role in ("grad_norm", "loss")]
    return (
        outcome.name,
        layout(outcome),
        number(outcome.first_norm, 6),
        *ratios,
        number(outcome.last_loss, 5),
        outcome.verdict,
        f"{outcome.seconds:.0f}",
    )


def layout(outcome: Outcome) -> str:
    """The degrees above 1, and how often gradients accumulate."""
    config = outcome.config
    parts = [f"{axis}={degree}" for axis, degree in config["axes"].items() if degree > 1]
    parts += [f"{name}={config[name]}" for name in ("accum", "microbatches") if config[name] > 1]
    return " ".join(parts) or "one process"


def as_text(result: Result) -> str:
    """For a terminal: the comparison, then what the recorded first steps told."""
    width = max(len(outcome.name) for outcome in result.outcomes)
    lines = [f"{outcome.name:<{width}}  {outcome.verdict}" for outcome in result.outcomes]
    return render.as_text(result.comparison) + "\nfrom the first step alone, recorded:\n" + "\n".join(lines) + "\n"


def as_markdown(result: Result) -> str:
    """For a page in a repository or a pull request."""
    table = [_line(HEADS), _line(["---"] * len(HEADS))]
    table += [_line([markdown.text(cell) for cell in row]) for row in rows(result)]
    config = result.outcomes[0].config
    about = (
        f"{config['steps']} optimizer steps of the same sequences from the same weights; the control is one process "
        f"with {config['accum']} accumulation steps. Ratios are means over all steps, 95 % band."
    )
    notes = [f"{test.name}: {note}" for test in result.comparison.tests for note in test.notes]
    notes += [
        f"{test.name}: {metric.text}"
        for test in result.comparison.tests
        for metric in test.metrics
        if metric.role == "grad_norm" and metric.state != "same"
    ]
    parts = [f"### gradcheck study: {markdown.text(render.headline(result.comparison))}", about, "\n".join(table)]
    parts += [markdown.bullets(notes)] if notes else []
    parts.append(f"<sub>gradcheck {__version__}</sub>")
    return "\n\n".join(parts) + "\n"


def as_html(result: Result) -> str:
    """A page with the curves of all strategies above their ratios."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in HEADS[1:])
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows(result)
    )
    table = (
        '<div class="scroll" tabindex="0" role="region" aria-label="strategies"><table class="words"><thead><tr>'
        f"<td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return render.as_html(result.comparison, sections=[table])


def as_json(result: Result) -> str:
    """For scripts."""
    content = {
        "schema_version": 1,
        "outcomes": [asdict(outcome) for outcome in result.outcomes],
        "comparison": json.loads(render.as_json(result.comparison)),
    }
    return json.dumps(content, indent=1) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"

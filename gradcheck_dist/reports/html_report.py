"""A report as one HTML file: verdict first, figures, tables, everything else folded. Opens offline, on any screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
from gradcheck_dist.reports.culprit import Culprit
from gradcheck_dist.reports.document import Document, FindingText, build, scenario_summary
from gradcheck_dist.reports.figure import Figure
from gradcheck_dist.reports.figures import norms_figure, ratio_figure, weights_figure
from gradcheck_dist.reports.page import PlotlyJs, escape, figure_html, page, prose_html
from gradcheck_dist.reports.text import printable
from gradcheck_dist.reports.timeline import timeline_figure
from gradcheck_dist.reports.weights import Cell, WeightTable
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import plural

MAX_FINDINGS = 200


def render(report: Report, run: Run | None = None, plotlyjs: PlotlyJs = "inline") -> str:
    """One run's report as a page. The timeline needs the run itself, all else stands in the report."""
    document = build(report)
    figures = report_figures(report, run)
    body = [*head(document), *_figures(figures), *sections(document), _tool(report.tool.name, report.tool.version)]
    return page(f"gradcheck: {document.headline}", body, figures, plotlyjs)


def render_scenario(report: ScenarioReport, plotlyjs: PlotlyJs = "inline") -> str:
    """A scenario's reports on one page, one folded part a variant."""
    sentence, lines = scenario_summary(report)
    state = "clean" if report.as_expected else "findings"
    body = [
        f'<section class="verdict {state}"><h1>{prose_html(sentence)}</h1>{bullets(lines)}</section>',
    ]
    every: list[Figure] = []
    for index, variant in enumerate(report.variants):
        if variant.report is None:
            continue
        document = build(variant.report)
        figures = report_figures(variant.report, None)
        every += figures
        inner = [*head(document, "h2"), *_figures(figures, f"v{index}-"), *sections(document)]
        body.append(
            f"<details open><summary>{escape(printable(variant.variant, 80))}</summary>{''.join(inner)}</details>"
        )
    body.append(_tool(report.tool.name, report.tool.version))
    return page(f"gradcheck: {sentence}", body, every, plotlyjs)


def report_figures(report: Report, run: Run | None) -> list[Figure]:
    """All figures that this report has data for."""
    found = [weights_figure(report), norms_figure(report), ratio_figure(report)]
    found.insert(1, timeline_figure(report, run) if run is not None else None)
    return [figure for figure in found if figure is not None]


def _figures(figures: Iterable[Figure], prefix: str = "") -> Iterator[str]:
    for figure in figures:
        yield figure_html(figure, f"{prefix}{figure.name}")


def head(document: Document, level: str = "h1") -> Iterator[str]:
    """Verdict, where, why, next, and the first culprit."""
    answer = "".join(f"<p><b>{label.capitalize()}</b> {prose_html(text)}</p>" for label, text in document.answer)
    yield (
        f'<section class="verdict {document.verdict}"><{level}>{prose_html(document.headline)}</{level}>{answer}'
        f'<p class="soft">{escape(document.title)}</p></section>'
    )
    if document.findings and document.findings[0].culprit:
        yield f"<h2>Culprit</h2>{culprit_html(document.findings[0].culprit)}"


def sections(document: Document) -> Iterator[str]:
    """Tables, findings in full, rules and coverage."""
    for table in document.tables:
        yield table_html(table)
    if document.tables_left_out:
        yield f'<p class="soft">and {plural(document.tables_left_out, "more table")} in the JSON report</p>'
    if document.findings:
        yield f"<h2>{plural(len(document.findings), 'finding')}</h2>"
    for index, finding in enumerate(document.findings[:MAX_FINDINGS]):
        yield _finding(finding, is_open=index == 0)
    if len(document.findings) > MAX_FINDINGS:
        rest = len(document.findings) - MAX_FINDINGS
        yield f'<p class="soft">{plural(rest, "more finding")} in the JSON report</p>'
    yield f"<details><summary>Coverage</summary>{bullets(document.coverage)}</details>"
    rows = "".join(
        f'<tr><th scope="row">{escape(rule.code)}</th><td>{escape(rule.name)}</td><td>{escape(rule.outcome)}</td>'
        f"<td>{prose_html(rule.summary)}</td></tr>"
        for rule in document.rules
    )
    yield f'<details><summary>Rules</summary><div class="scroll"><table class="words">{rows}</table></div></details>'


def _finding(finding: FindingText, *, is_open: bool) -> str:
    lines = [finding.factor, finding.where, finding.explanation, f"Fix: {finding.fix}", *finding.facts]
    culprit = culprit_html(finding.culprit) if finding.culprit else ""
    state = " open" if is_open else ""
    return (
        f"<details{state}><summary><b>{escape(finding.title)}</b> ({escape(finding.severity)})</summary>"
        f"{bullets(lines)}{culprit}</details>"
    )


def culprit_html(culprit: Culprit) -> str:
    """The culprit's line, its source with the line marked, and what is known."""
    rows = []
    for marked, line_number, text in culprit.excerpt.numbered() if culprit.excerpt else ():
        row = escape(f"{'>' if marked else ' '} {line_number:>4} | {text}")
        rows.append(f"<mark>{row}</mark>" if marked else row)
    source = f'<pre tabindex="0" aria-label="source">{chr(10).join(rows)}</pre>' if rows else ""
    return f"<p><code>{escape(culprit.line)}</code></p>{source}{bullets(culprit.facts)}"


def table_html(table: WeightTable) -> str:
    """A weight table: ratio, and small below it observed of expected."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = []
    for label, cells in table.rows:
        shown = "".join(
            f'<td class="{"off" if cell.off else ""}"><b>{escape(cell.ratio)}</b>{_small(cell)}</td>' for cell in cells
        )
        rows.append(f'<tr><th scope="row">{escape(label)}</th>{shown}</tr>')
    # Beside the table and not its caption: on a narrow screen a caption would scroll away with it.
    words = escape(f"{table.caption}: {table.note}. Ratio, and observed of expected.")
    return (
        f'<p class="soft">{words}</p><div class="scroll" tabindex="0" role="region" aria-label="weights">'
        f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _small(cell: Cell) -> str:
    known = cell.observed != cell.expected or cell.observed not in ("-", "…")
    return f"<small>{escape(cell.observed)} of {escape(cell.expected)}</small>" if known else ""


def bullets(lines: Iterable[str]) -> str:
    """A list of prose."""
    items = "".join(f"<li>{prose_html(line)}</li>" for line in lines if line)
    return f"<ul>{items}</ul>" if items else ""


def _tool(name: str, version: str) -> str:
    return f'<footer class="soft">{escape(printable(name, 80))} {escape(printable(version, 80))}</footer>'

"""Reports on a terminal: rich where somebody looks on, plain text where a pipe reads. rich is imported only then."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TextIO

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
from gradcheck_dist.reports import plain
from gradcheck_dist.reports.document import Document, build, scenario_summary

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from gradcheck_dist.reports.document import FindingText
    from gradcheck_dist.reports.weights import WeightTable

_STYLES = {"clean": "green", "findings": "red", "undetermined": "yellow"}


def is_interactive(stream: TextIO) -> bool:
    """Whether somebody looks at `stream` on a terminal that can move and colour."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def write_report(report: Report, stream: TextIO) -> None:
    """Write one report to `stream`."""
    document = build(report)
    if is_interactive(stream):
        render(document, _console(stream))
    else:
        stream.write(plain.render(document))


def write_scenario(report: ScenarioReport, stream: TextIO) -> None:
    """Write a scenario's result: a summary, then each variant's report."""
    sentence, lines = scenario_summary(report)
    documents = [build(variant.report) for variant in report.variants if variant.report is not None]
    if is_interactive(stream):
        from rich.text import Text

        console = _console(stream)
        for document in documents:
            render(document, console)
            console.print()
        console.print(Text(sentence, style="bold green" if report.as_expected else "bold red"))
        for line, variant in zip(lines, report.variants, strict=True):
            console.print(Text(f"  {line}", style="" if variant.as_expected else "red"))
        return
    for document in documents:
        stream.write(plain.render(document) + "\n")
    wrapped = [row for line in lines for row in plain.paragraph(line, "  ")]
    stream.write("\n".join([*plain.paragraph(sentence), *wrapped]) + "\n")


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def render(document: Document, console: Console) -> None:
    """Print a document to a rich console; text goes out as it is, never as markup."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    style = _STYLES[document.verdict]
    grid.add_row("verdict", Text(document.headline, style=f"bold {style}"))
    for label, text in document.answer:
        grid.add_row(label, Text(text, style="bold" if label == "where" else ""))
    console.print(
        Panel(grid, title=Text(document.title), title_align="left", border_style=style, width=_width(console))
    )
    for table in document.tables:
        console.print(Text(table.caption), overflow="fold")
        console.print(_weights(table))
        console.print(Text(f"  {table.note}", style="dim"))
    if document.tables_left_out:
        console.print(Text(f"  and {document.tables_left_out} more in the JSON report", style="dim"))
    for index, finding in enumerate(document.findings):
        for part in _finding(finding, brief=index == 0 and document.verdict == "findings"):
            console.print(part, overflow="fold")
    console.print(Text("coverage", style="bold"))
    for line in document.coverage:
        console.print(Text(f"  {line}", style="yellow" if line.startswith("problem") else "dim"), overflow="fold")


def _width(console: Console) -> int:
    return min(console.width, 110)


def _finding(finding: FindingText, *, brief: bool) -> list[Text]:
    from rich.text import Text

    parts = [Text(f"{finding.title}: ", style="bold").append(finding.where, style="not bold")]
    if finding.culprit:
        parts.append(Text("  ").append(finding.culprit.line, style="bold cyan"))
        for marked, number, text in finding.culprit.excerpt.numbered() if finding.culprit.excerpt else ():
            sign = ">" if marked else " "
            parts.append(Text(f"    {sign} {number:>4} │ {text}", style="bold" if marked else "dim"))
        parts += [Text(f"    {fact}", style="dim") for fact in finding.culprit.facts]
    if not brief:
        parts += [Text(f"  {finding.factor}"), Text(f"  {finding.explanation}"), Text(f"  {finding.fix}")]
    return parts + [Text(f"  {fact}") for fact in finding.facts]


def _weights(table: WeightTable) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("")
    view.add_column("")
    for column in table.columns:
        view.add_column(column, justify="right")
    for label, cells in table.rows:
        names = "\n".join(("expected", "observed", "ratio")) if label != "…" else ""
        stacked = []
        for cell in cells:
            text = Text(f"{cell.expected}\n{cell.observed}\n", justify="right")
            stacked.append(text.append(cell.ratio, style="bold red" if cell.off else "green"))
        view.add_row(Text(label), names, *(stacked if label != "…" else ["…"] * len(cells)))
    return view

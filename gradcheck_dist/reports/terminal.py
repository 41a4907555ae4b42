"""Reports on a terminal: rich where somebody looks on, plain text where a pipe reads. rich is imported only then."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TextIO

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
from gradcheck_dist.reports import plain
from gradcheck_dist.reports.document import Document, build, scenario_summary
from gradcheck_dist.reports.text import clip

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
            console.print(_wrapped(line, "  ", _width(console), "" if variant.as_expected else "red"))
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
        console.print(_wrapped(table.caption, "", _width(console)))
        console.print(_weights(table))
        console.print(Text(f"  {table.note}", style="dim"))
    if document.tables_left_out:
        console.print(Text(f"  and {document.tables_left_out} more in the JSON report", style="dim"))
    for index, finding in enumerate(document.findings):
        console.print()
        for part in _finding(finding, _width(console), brief=index == 0 and document.verdict == "findings"):
            console.print(part, overflow="fold")
    console.print()
    console.print(Text("coverage", style="bold"))
    for line in document.coverage:
        style = "yellow" if line.startswith("problem") else "dim"
        console.print(_wrapped(line, "  ", _width(console), style), overflow="fold")


def _width(console: Console) -> int:
    return min(console.width, 110)


def _wrapped(text: str, indent: str, width: int, style: str = "") -> Text:
    """Text whose continuation lines are indented too."""
    from rich.text import Text

    return Text("\n".join(plain.paragraph(text, indent, width)), style=style)


def _finding(finding: FindingText, width: int, *, brief: bool) -> list[Text]:
    from rich.text import Text

    title = _wrapped(f"{finding.title}: {finding.where}", "", width)
    title.stylize("bold", 0, len(finding.title) + 1)
    parts = [title]
    if finding.culprit:
        parts.append(_wrapped(finding.culprit.line, "  ", width, "bold cyan"))
        for marked, number, text in finding.culprit.excerpt.numbered() if finding.culprit.excerpt else ():
            sign = ">" if marked else " "
            row = clip(f"    {sign} {number:>4} │ {text}", width)
            parts.append(Text(row, style="bold" if marked else "dim"))
        parts += [_wrapped(fact, "    ", width, "dim") for fact in finding.culprit.facts]
    told = {} if brief else {"what": finding.factor, "why": finding.explanation, "next": finding.fix}
    parts += [Text("\n".join(plain.labelled(label, text, width))) for label, text in told.items()]
    return parts + [_wrapped(fact, "  ", width) for fact in finding.facts]


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

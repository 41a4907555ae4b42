"""A document as plain text of at most 100 columns: for pipes, log files and terminals without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from gradcheck_dist.reports.culprit import Culprit
from gradcheck_dist.reports.document import Document
from gradcheck_dist.reports.text import clip
from gradcheck_dist.reports.weights import WeightTable
from gradcheck_dist.wording import plural

WIDTH = 100


def render(document: Document) -> str:
    """The whole document, ending with a line break."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield from paragraph(document.title)
    yield from labelled("verdict", document.headline)
    for label, text in document.answer:
        yield from labelled(label, text)
    for table in document.tables:
        yield ""
        yield from weight_table(table)
    if document.tables_left_out:
        yield f"  and {plural(document.tables_left_out, 'more table')} in the JSON report"
    for index, finding in enumerate(document.findings):
        yield ""
        yield from paragraph(f"{finding.title}: {finding.where}")
        if finding.culprit:
            yield from _culprit(finding.culprit)
        if index or document.verdict != "findings":  # else the verdict has said it
            yield from labelled("what", finding.factor)
            yield from labelled("why", finding.explanation)
            yield from labelled("next", finding.fix)
        for fact in finding.facts:
            yield from paragraph(fact, "  ")
    yield ""
    yield "coverage"
    for line in document.coverage:
        yield from paragraph(line, "  ")


def paragraph(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    """`text` wrapped; continuation lines are indented a little more."""
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "  ") or [indent]


def labelled(label: str, text: str, width: int = WIDTH) -> list[str]:
    """A label in a left margin with its text beside it."""
    return textwrap.wrap(text, width, initial_indent=f"  {label:<8} ", subsequent_indent=" " * 11) or [f"  {label}"]


def _culprit(culprit: Culprit) -> Iterator[str]:
    yield from paragraph(culprit.line, "  ")
    for marked, number, text in culprit.excerpt.numbered() if culprit.excerpt else ():
        yield clip(f"    {'>' if marked else ' '} {number:>4} | {text}", WIDTH)
    for fact in culprit.facts:
        yield from paragraph(fact, "    ")


def weight_table(table: WeightTable) -> Iterator[str]:
    """Three lines a row: expected, observed, ratio."""
    yield from paragraph(table.caption)
    width = max([11, *(len(label) for label, _ in table.rows)])
    yield f"  {'':<{width}}  {'':<8}" + "".join(f"{column:>11}" for column in table.columns)
    for label, cells in table.rows:
        for name in ("expected", "observed", "ratio"):
            values = "".join(f"{getattr(cell, name):>11}" for cell in cells)
            yield f"  {label if name == 'expected' else '':<{width}}  {name:<8}{values}"
            if label == "…":
                break
    yield f"  {table.note}"

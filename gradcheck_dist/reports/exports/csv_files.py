"""One CSV file a table, and one that tells the unit and meaning of every column."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.reports.tables import COLUMNS, table
from gradcheck_dist.reports.text import printable
from gradcheck_dist.trace.run import Run


def write(report: Report, run: Run | None, output: Path) -> list[Path]:
    """Write the tables into the folder `output`."""
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name, columns in COLUMNS.items():
        rows = table(name, report, run).rows
        written.append(_file(output / f"{name}.csv", [column.name for column in columns], rows))
    described = (
        (name, column.name, column.kind, column.unit, column.meaning)
        for name, columns in COLUMNS.items()
        for column in columns
    )
    written.append(_file(output / "columns.csv", ["table", "column", "kind", "unit", "meaning"], described))
    return written


def _file(path: Path, head: list[str], rows: Iterable[tuple[Any, ...]]) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows([_cell(value) for value in row] for row in rows)
    return path


def _cell(value: Any) -> Any:
    """Text on one line that a spreadsheet does not take for a formula."""
    if not isinstance(value, str):
        return value
    shown = printable(value, 4000)
    return f"'{shown}" if shown[:1] in ("=", "+", "-", "@") else shown

"""Freezing the scale of a run, and comparing another one with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradcheck_dist.cli.output import write_file
from gradcheck_dist.errors import GradcheckError

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Report
    from gradcheck_dist.reports.golden import Golden

ExportGolden = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Freeze weights, findings and norms of this run in FILE.")
]
GoldenFile = Annotated[
    Path | None,
    typer.Option("--golden", metavar="FILE", help="Compare with what was frozen; exit 1 when it changed, 0 when not."),
]


def read(path: Path) -> Golden:
    """The golden file at `path`.

    Raises:
        GradcheckError: E704 there is none.
    """
    from gradcheck_dist.reports.golden import decode

    try:
        data = path.read_bytes()
    except OSError as error:
        raise GradcheckError(
            f"cannot read {path}: {error.strerror or error}. Write it with --export-golden.", code="E704"
        ) from error
    return decode(data, str(path))


def export(report: Report, path: Path) -> None:
    """Freeze a report in a file."""
    from gradcheck_dist.reports.golden import encode, freeze

    write_file(path, encode(freeze(report)))
    typer.echo(f"wrote {path}", err=True)


def check(report: Report, golden: Golden, name: str) -> int:
    """Tell on stderr what changed; the exit code: 0 nothing, 1 something, 2 could not judge."""
    from gradcheck_dist.reports.golden import differences

    told = differences(golden, report)
    for line in told:
        typer.echo(f"golden: {line}", err=True)
    if not told:
        typer.echo(f"golden: as frozen in {name}", err=True)
    return 2 if report.verdict == "undetermined" else int(bool(told))

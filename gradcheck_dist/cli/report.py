"""gradcheck report RUN"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradcheck_dist.cli.diagnose import Objective, Steps, parse_steps
from gradcheck_dist.cli.output import FileFormat, check_writable, render, show, write_file
from gradcheck_dist.cli.progress import Progress

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Report, ScenarioReport


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or a JSON report that was written before.")],
    form: Annotated[
        FileFormat, typer.Option("--format", help="json, or md for a pull request comment.")
    ] = FileFormat.md,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: stdout.")] = None,
    objective: Objective = None,
    steps: Steps = None,
) -> None:
    """Write the report of a run as JSON or Markdown.

    Exit codes: 0 it was written, whatever the verdict; 2 it could not be. Needs no torch.
    """
    if output is not None:
        check_writable(output)
    judged = _load(run, objective, steps)
    if output is None:
        show(judged, form)
    else:
        write_file(output, render(judged, form))
        typer.echo(f"wrote {output}", err=True)


def _load(run: Path, objective: str | None, steps: str | None) -> Report | ScenarioReport:
    if run.is_file():
        from gradcheck_dist.reports.json_report import decode

        return decode(run.read_bytes(), str(run))
    from gradcheck_dist.diagnosis.engine import diagnose
    from gradcheck_dist.trace.run import read_run

    chosen = parse_steps(steps)
    with Progress(f"judging {run}"):
        return diagnose(read_run(run), objective=objective, steps=chosen)

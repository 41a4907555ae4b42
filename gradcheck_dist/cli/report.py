"""gradcheck report RUN"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradcheck_dist.cli.diagnose import MAX_JOBS, Objective, Steps
from gradcheck_dist.cli.output import FileFormat, check_ending, check_writable, write_file
from gradcheck_dist.cli.progress import Progress
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.steps import parse_steps

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
    from gradcheck_dist.trace.run import Run
    from gradcheck_dist.trace.store import Place


class PlotlyJs(StrEnum):
    """Where the figures' plotly.js is: inside every page, or once beside them."""

    inline = "inline"
    shared = "shared"


def report(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run folder, here or as a URL, or a JSON report.")
    ] = None,
    form_given: Annotated[
        FileFormat | None,
        typer.Option("--format", help="Default: as the file to write is called, else md, a pull request comment."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: stdout.")] = None,
    before: Annotated[
        list[str] | None, typer.Option(metavar="A", help="Run or report of the fault; with --after, md or html.")
    ] = None,
    after: Annotated[list[str] | None, typer.Option(metavar="B", help="Run or report of the fix.")] = None,
    plotlyjs: Annotated[
        PlotlyJs, typer.Option(help="html: plotly.js in the page (4.8 MB), or shared in one file beside it.")
    ] = PlotlyJs.inline,
    objective: Objective = None,
    steps: Steps = None,
) -> None:
    """Write a run's report for scripts, pull requests, browsers or CI.

    --before A --after B shows a fault and its fix side by side; both may be given several times, pair by pair.

    Exit codes: 0 it was written, whatever the verdict; 2 it could not be. Needs no torch.
    """
    if output is not None:
        check_writable(output)
    form = form_given or _form_of(output)
    if plotlyjs == PlotlyJs.shared and output is None:
        raise GradcheckError("--plotlyjs shared writes a second file. Name the page with --output FILE.", code="E715")
    faults, fixes = before or [], after or []
    if (run is None) == (not faults and not fixes) or len(faults) != len(fixes):
        raise GradcheckError(
            "name one RUN, or as many --before as --after: `gradcheck report RUN` or "
            "`gradcheck report --before A --after B`.",
            code="E716",
        )
    if run is not None:
        from gradcheck_dist.reports import formats
        from gradcheck_dist.trace.store import place_of

        place = place_of(run)
        judged = _load(place, objective, steps)
        recorded = _events(place, judged) if form == FileFormat.html and place.is_dir() else None
        text = formats.write(judged, form.value, run=recorded, plotlyjs=plotlyjs.value)
    else:
        text = _pairs(faults, fixes, form, objective, steps)
    if output is None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(text)
        return
    write_file(output, text)
    typer.echo(f"wrote {output}", err=True)
    if form == FileFormat.html and plotlyjs == PlotlyJs.shared:
        _write_shared(output)


def _form_of(output: Path | None) -> FileFormat:
    from gradcheck_dist.reports.formats import SUFFIXES

    if output is None or not output.suffix:
        return FileFormat.md
    return FileFormat(SUFFIXES[check_ending(output, SUFFIXES, "--output", "or give --format")])


def _load(path: Place, objective: str | None, steps: str | None) -> Report | ScenarioReport:
    if path.is_file():
        from gradcheck_dist.reports.json_report import decode

        return decode(path.read_bytes(), str(path))
    from gradcheck_dist.stream.diagnose import diagnose_run

    chosen = parse_steps(steps)
    with Progress(f"judging {path}") as progress:
        return diagnose_run(
            path,
            objective=objective,
            steps=chosen,
            jobs=min(os.cpu_count() or 1, MAX_JOBS),
            progress=lambda done: progress.update(f"judging {path}: {done}"),
        )


def _events(run: Place, judged: Report | ScenarioReport) -> Run:
    """The events that a timeline is drawn from."""
    from gradcheck_dist.diagnosis.finding import Report
    from gradcheck_dist.reports.timeline import chosen_ranks
    from gradcheck_dist.trace.run import read_run, trace_files

    ranks = chosen_ranks(list(trace_files(run)), judged) if isinstance(judged, Report) else None
    with Progress(f"reading {run}"):
        return read_run(run, ranks=ranks, samples=False)


def _pairs(faults: list[str], fixes: list[str], form: FileFormat, objective: str | None, steps: str | None) -> str:
    from gradcheck_dist.diagnosis.finding import Report
    from gradcheck_dist.reports import pair_render
    from gradcheck_dist.reports.pair import compare
    from gradcheck_dist.trace.store import place_of

    if form not in (FileFormat.md, FileFormat.html):
        raise GradcheckError(f"a pair has no format {form.value}; legal values are md and html.", code="E716")
    pairs = []
    for fault, fix in zip(faults, fixes, strict=True):
        judged = [_load(place_of(one), objective, steps) for one in (fault, fix)]
        first, second = judged
        if not isinstance(first, Report) or not isinstance(second, Report):
            raise GradcheckError(
                "a scenario's report holds several runs. Name the run folders that `gradcheck scenario --keep` leaves.",
                code="E716",
            )
        pairs.append(compare(first, second))
    return pair_render.as_markdown(pairs) if form == FileFormat.md else pair_render.as_html(pairs)


def _write_shared(page: Path) -> None:
    from gradcheck_dist.reports.page import plotly_source, shared_file

    script = page.with_name(shared_file())
    if not script.exists():
        write_file(script, plotly_source())
        typer.echo(f"wrote {script}", err=True)

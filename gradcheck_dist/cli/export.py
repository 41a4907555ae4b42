"""gradcheck export RUN"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gradcheck_dist.cli.diagnose import MAX_JOBS, Objective, Steps
from gradcheck_dist.cli.output import check_writable
from gradcheck_dist.cli.progress import Progress
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.steps import parse_steps


class ExportFormat(StrEnum):
    """For which program."""

    csv = "csv"
    parquet = "parquet"
    perfetto = "perfetto"
    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its URL in a store.")],
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="csv, parquet: tables. perfetto: a timeline for ui.perfetto.dev. tensorboard, wandb, mlflow: scalars.",
        ),
    ] = ExportFormat.csv,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder (perfetto: file) to write. Default: RUN/export/FORMAT."),
    ] = None,
    objective: Objective = None,
    steps: Steps = None,
) -> None:
    """Write a run's tables, timeline or scalars for other programs.

    Exit codes: 0 written, 2 it could not be.
    """
    from gradcheck_dist.trace.store import place_of

    folder, chosen = place_of(run), parse_steps(steps)
    is_file = form == ExportFormat.perfetto
    if output is not None:
        place = output
    elif isinstance(folder, Path):
        place = folder / "export" / (f"{form.value}.json" if is_file else form.value)
    else:
        raise GradcheckError(
            f"an export is written beside its run, and {folder} is only read. Name a place on this machine with "
            "--output.",
            code="E711",
        )
    from gradcheck_dist.reports import exports
    from gradcheck_dist.stream.diagnose import diagnose_run
    from gradcheck_dist.trace.run import read_run

    with Progress(f"judging {folder}") as progress:
        report = diagnose_run(
            folder,
            objective=objective,
            steps=chosen,
            jobs=min(os.cpu_count() or 1, MAX_JOBS),
            progress=lambda done: progress.update(f"judging {folder}: {done}"),
        )
        progress.update(f"reading {folder}")
        recorded = read_run(folder, samples=False)
        progress.update(f"writing {place}")
        try:
            if output is None:
                place.parent.mkdir(parents=True, exist_ok=True)
            if is_file:
                check_writable(place)
            written = exports.write(report, recorded, form.value, place)
        except OSError as error:
            raise GradcheckError(
                f"cannot write {place}: {error.strerror or error}. Name another with --output.", code="E711"
            ) from error
    for path in written:
        typer.echo(str(path))

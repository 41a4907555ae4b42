"""gradcheck diagnose RUN"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from gradcheck_dist.cli import golden as golden_file
from gradcheck_dist.cli.output import Format, check_writable, show
from gradcheck_dist.cli.progress import Progress
from gradcheck_dist.steps import parse_steps

if TYPE_CHECKING:
    from gradcheck_dist.stream.workers import Workers

Objective = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What a step's gradient is meant to be: global-token-mean, microbatch-mean, rank-token-mean, "
        "sequence-mean or sum. Default: as recorded or inferred.",
    ),
]
Steps = Annotated[str | None, typer.Option(metavar="A:B", help="Judge the steps from A up to, not including, B.")]

MAX_JOBS = 8


def diagnose(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its URL in a store, as s3://bucket/run.")],
    form: Annotated[Format, typer.Option("--format", help="How to write the report.")] = Format.text,
    objective: Objective = None,
    steps: Steps = None,
    first: Annotated[bool, typer.Option("--first", help="Stop at the first step with a finding.")] = False,
    jobs: Annotated[
        int, typer.Option(min=0, metavar="N", help="Processes that judge a long run; 0: one for each core.")
    ] = 0,
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="local|ADDRESS",
            help="Judge on a Dask cluster: on one of this machine with --jobs workers, or on that of the scheduler at "
            "tcp://HOST:PORT. Its workers read the run themselves.",
        ),
    ] = None,
    export_golden: golden_file.ExportGolden = None,
    golden: golden_file.GoldenFile = None,
) -> None:
    """Judge a recorded run.

    Shows every weight, the first operation that made it wrong, and its line. Needs no torch. Reads step after step,
    so that a run of any length fits into memory.

    Exit codes: 0 clean, 1 findings, 2 could not judge. With --golden: 0 as frozen, 1 not, 2 could not judge.
    """
    from gradcheck_dist.stream.diagnose import diagnose_run
    from gradcheck_dist.trace.store import place_of

    place, chosen = place_of(run), parse_steps(steps)
    frozen = golden_file.read(golden) if golden is not None else None
    if export_golden is not None:
        check_writable(export_golden)
    jobs = jobs or min(os.cpu_count() or 1, MAX_JOBS)
    with Progress(f"reading {place}") as progress, _workers(dask, jobs) as workers:
        report = diagnose_run(
            place,
            objective=objective,
            steps=chosen,
            first=first,
            jobs=jobs,
            workers=workers,
            progress=lambda done: progress.update(f"judging {place}: {done}"),
        )
    show(report, form)
    if export_golden is not None:
        golden_file.export(report, export_golden)
    if frozen is not None:
        raise typer.Exit(golden_file.check(report, frozen, str(golden)))
    raise typer.Exit(report.exit_code)


def _workers(address: str | None, jobs: int) -> AbstractContextManager["Workers | None"]:
    if address is None:
        return nullcontext()
    from gradcheck_dist.stream.on_dask import on_dask

    return on_dask(address, jobs)

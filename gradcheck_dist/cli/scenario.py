"""gradcheck scenario NAME"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gradcheck_dist.cli.output import FileFormat, Format, check_writable, render, show, write_file
from gradcheck_dist.cli.progress import Progress
from gradcheck_dist.errors import GradcheckError


class Dtype(StrEnum):
    """Number formats of parameters and gradients."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def scenario(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which bug to reproduce.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the scenarios and stop.")] = False,
    nproc: Annotated[int | None, typer.Option(help="Number of ranks on this machine.")] = None,
    accum: Annotated[int | None, typer.Option(help="Accumulation steps of one optimizer step.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Pipeline microbatches of one accumulation step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights and of the order of the documents.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of parameters and gradients.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    data: Annotated[Path | None, typer.Option(help="Text or JSONL file, or a folder of them, to train on.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report: .md as Markdown, else JSON.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Leave one run folder a variant, DIR/<variant>.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How to write the result to stdout.")] = Format.text,
) -> None:
    """Reproduce a known bug and diagnose it.

    Every variant trains on this machine; the faulty ones must be named, the fixed twin must be clean.

    Exit codes: 0 everything was found exactly as the scenario says, 1 not, 2 it could not run.
    """
    if list_:
        _list()
        return
    if name is None:
        raise GradcheckError("no scenario was named. Legal values: " + ", ".join(_names()) + ".", code="E601")
    from gradcheck_dist.scenarios.jobs import Overrides, check
    from gradcheck_dist.scenarios.schema import load

    chosen = load(name)
    overrides = Overrides(nproc, accum, microbatches, seed, steps, dtype, str(data) if data is not None else None)
    check(chosen, overrides, keep)
    if report is not None:
        check_writable(report)
    from gradcheck_dist.trainer.launch import warm_up

    # torch loads in the fork server from here on, while this process loads the rest.
    warm_up()
    from gradcheck_dist.scenarios.runner import run_scenario

    with Progress(f"{name}: starting") as progress:
        result = run_scenario(
            chosen, overrides, keep=keep, command=("gradcheck", *sys.argv[1:]), on_progress=progress.update
        )
    show(result.report, form)
    if report is not None:
        write_file(report, render(result.report, FileFormat.md if report.suffix == ".md" else FileFormat.json))
        typer.echo(f"wrote {report}", err=True)
    if result.error is not None:
        raise result.error
    if result.run_dir is not None:
        typer.echo(f"the runs are in {result.run_dir}", err=True)
    raise typer.Exit(result.exit_code)


def _names() -> list[str]:
    from gradcheck_dist.scenarios.schema import library

    return library()


def _list() -> None:
    from gradcheck_dist.scenarios.schema import load

    for name in _names():
        found = load(name)
        typer.echo(f"{name:<18} {found.title}")
        typer.echo(f"{'':<18} {', '.join(variant.name for variant in found.variants)}")

"""gradcheck compare CONTROL TEST..."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradcheck_dist.cli.output import check_ending, check_writable, write_file
from gradcheck_dist.cli.places import local
from gradcheck_dist.cli.progress import Progress

if TYPE_CHECKING:
    from gradcheck_dist.compare.comparison import Comparison


class CompareFormat(StrEnum):
    """How a comparison is written."""

    text = "text"
    md = "md"
    html = "html"
    json = "json"


BY_SUFFIX = {
    ".md": CompareFormat.md,
    ".html": CompareFormat.html,
    ".json": CompareFormat.json,
    ".txt": CompareFormat.text,
}


class By(StrEnum):
    """What the curves are aligned by."""

    step = "step"
    tokens = "tokens"


def compare(
    control: Annotated[
        Path,
        typer.Argument(
            metavar="CONTROL",
            parser=local("gradcheck compare"),
            help="Run or TensorBoard folder, report, CSV (FILE#RUN).",
        ),
    ],
    tests: Annotated[
        list[Path],
        typer.Argument(metavar="TEST...", parser=local("gradcheck compare"), help="The same of the jobs in question."),
    ],
    axes: Annotated[
        str | None, typer.Option(metavar="dp=4,pp=2,accum=10", help="Degrees that may explain a constant ratio.")
    ] = None,
    by: Annotated[By, typer.Option(help="Align by optimizer step, or by tokens seen.")] = By.step,
    loss: Annotated[str | None, typer.Option(metavar="NAME", help="The loss's name in the logs.")] = None,
    grad_norm: Annotated[str | None, typer.Option(metavar="NAME", help="The gradient norm's name.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="NAME", help="The tokens' name.")] = None,
    form: Annotated[
        CompareFormat | None,
        typer.Option("--format", help="html shows the curves. Default: as the file to write is called, else text."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: stdout.")] = None,
) -> None:
    """Compare runs or logs: what factor lies between their norms?

    Works on logs of jobs that ended long ago and never had a probe.

    Exit codes: 0 all coincide, 1 some test is off, 2 could not compare.
    """
    if output is not None:
        check_writable(output)
    form = form or _form_of(output)
    from gradcheck_dist.compare import comparison, sources

    degrees = comparison.parse_axes(axes)
    wanted = {"loss": loss, "grad_norm": grad_norm, "tokens": tokens}
    with Progress(f"reading {len(tests) + 1} jobs") as progress:
        read = sources.read_all([control, *tests], wanted)
        progress.update("comparing")
        found = comparison.compare(read[0], read[1:], degrees, by.value)
        text = _render(found, form)
    if output is None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(text)
    else:
        write_file(output, text)
        typer.echo(f"wrote {output}", err=True)
    raise typer.Exit(found.exit_code)


def _form_of(output: Path | None) -> CompareFormat:
    if output is None or not output.suffix:
        return CompareFormat.text
    return BY_SUFFIX[check_ending(output, BY_SUFFIX, "--output", "or give --format")]


def _render(found: Comparison, form: CompareFormat) -> str:
    from gradcheck_dist.compare import render

    return {
        CompareFormat.text: render.as_text,
        CompareFormat.md: render.as_markdown,
        CompareFormat.html: render.as_html,
        CompareFormat.json: render.as_json,
    }[form](found)

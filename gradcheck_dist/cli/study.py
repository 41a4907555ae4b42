"""gradcheck study"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradcheck_dist.cli.compare import BY_SUFFIX, CompareFormat
from gradcheck_dist.cli.interrupted import telling
from gradcheck_dist.cli.output import check_ending, check_writable, make_folder, write_file
from gradcheck_dist.cli.progress import Progress

if TYPE_CHECKING:
    from gradcheck_dist.scenarios.study import Result


def study(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML file of a study. Default: the package's own.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Logs and recorded steps; what has ended there is kept.")
    ] = Path("study"),
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each, in place of the file's.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="STRATEGY", help="Only this one; may be repeated.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write it: .md, .html, .json, or .svg for the norms.")
    ] = None,
    form: Annotated[CompareFormat, typer.Option("--format", help="How to write it to stdout.")] = CompareFormat.text,
) -> None:
    """Lay the curves of parallel strategies beside those of one process.

    All train one model. The first step of each is also recorded and judged: what the curves tell after hundreds of
    steps, it tells at once. Interrupted, the same command goes on behind the last strategy that ended;
    tensorboard --logdir DIR shows all.

    Exit codes: 0 all coincide with the control, 1 some strategy is off, 2 it could not run.
    """
    if report is not None:
        check_ending(report, (*BY_SUFFIX, ".svg"))
    from gradcheck_dist.scenarios import study as studies

    chosen = studies.load(config, steps, tuple(only or ()))
    make_folder(out)
    if report is not None:
        check_writable(report)
    from gradcheck_dist.trainer.launch import warm_up

    warm_up()
    left = f"what has ended is kept in {out}: the same command goes on behind it."
    with telling(lambda: left), Progress("starting") as progress:
        result = studies.run(chosen, out, progress.update)
    sys.stdout.write(_render(result, form))
    if report is not None:
        write_file(report, _written(result, report.suffix.lower()))
        typer.echo(f"wrote {report}", err=True)
    raise typer.Exit(result.comparison.exit_code)


def _written(result: Result, suffix: str) -> str:
    if suffix != ".svg":
        return _render(result, BY_SUFFIX[suffix])
    from gradcheck_dist.scenarios.study_picture import as_svg

    return as_svg(result)


def _render(result: Result, form: CompareFormat) -> str:
    from gradcheck_dist.scenarios import study_render

    return {
        CompareFormat.text: study_render.as_text,
        CompareFormat.md: study_render.as_markdown,
        CompareFormat.html: study_render.as_html,
        CompareFormat.json: study_render.as_json,
    }[form](result)

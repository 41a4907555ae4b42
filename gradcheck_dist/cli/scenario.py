"""gradcheck scenario NAME"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradcheck_dist.cli.interrupted import runs_left, telling
from gradcheck_dist.cli.output import (
    TABLE_ENDINGS,
    Format,
    beside,
    check_ending,
    check_report,
    check_writable,
    show,
    write_file,
    write_report,
)
from gradcheck_dist.cli.places import local, quoted
from gradcheck_dist.cli.progress import Progress
from gradcheck_dist.errors import GradcheckError

if TYPE_CHECKING:
    from gradcheck_dist.scenarios import table
    from gradcheck_dist.scenarios.jobs import Overrides


class Dtype(StrEnum):
    """Number formats of parameters and gradients."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def scenario(
    name: Annotated[str | None, typer.Argument(metavar="NAME|FILE.yaml", help="Which bug to reproduce.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the scenarios and stop.")] = False,
    all_: Annotated[bool, typer.Option("--all", help="Run every scenario; one table, also after a failure.")] = False,
    new: Annotated[
        str | None, typer.Option("--new", metavar="NAME", help="Write the skeleton of a scenario of your own and stop.")
    ] = None,
    library: Annotated[
        Path | None, typer.Option("--library", metavar="DIR", help="Scenarios out of this folder, not the package's.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of ranks on this machine.")] = None,
    accum: Annotated[int | None, typer.Option(help="Accumulation steps of one optimizer step.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Pipeline microbatches of one accumulation step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights and of the order of the documents.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of parameters and gradients.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    data: Annotated[Path | None, typer.Option(help="Text or JSONL file, or a folder of them, to train on.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the report, by ending: .json .md .html .sarif .xml; with --all .md or .json."
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=local("recording"), help="Leave one run folder a variant, DIR/<variant>."),
    ] = None,
    tui: Annotated[bool, typer.Option("--tui", help="Look at the runs on the screens before the result.")] = False,
    form: Annotated[Format, typer.Option("--format", help="How to write the result to stdout.")] = Format.text,
) -> None:
    """Reproduce a known bug and diagnose it.

    Every variant trains on this machine; the faulty ones must be named, the fixed twin must be clean.

    Exit codes: 0 everything was found exactly as the scenario says, 1 not, 2 it could not run.
    """
    if list_:
        _list(library, form)
        return
    if new is not None:
        _new(new, library)
        return
    if name is not None and library is None and name.endswith(".yaml"):
        if not Path(name).is_file():
            raise _no_file(Path(name))
        library, name = Path(name).parent, Path(name).stem
    elif name is not None and library is None and Path(name).is_file():
        raise GradcheckError(f"{name} is no scenario file: these end in .yaml. Rename it, if it is one.", code="E601")
    if name is None and not all_:
        raise GradcheckError(
            "no scenario was named. Name one, as in `gradcheck scenario ddp-accum`; `gradcheck scenario --list` shows "
            "all, --all runs all.",
            code="E601",
        )
    if name is not None and all_:
        raise GradcheckError(f"--all runs {name} too. Name a scenario, or give --all.", code="E601")
    if tui:
        from gradcheck_dist.cli.live import check_terminal

        if name is None:
            raise GradcheckError("--tui shows the runs of one scenario. Name one instead of --all.", code="E601")
        check_terminal("--tui")
    from gradcheck_dist.scenarios.jobs import Overrides

    overrides = Overrides(nproc, accum, microbatches, seed, steps, dtype, str(data) if data is not None else None)
    if name is None:
        if report is not None:
            check_ending(report, TABLE_ENDINGS)
            check_writable(report)
        _run_all(library, overrides, keep, report, form)
    else:
        check_report(report)
        _run_one(name, library, overrides, keep, report, form, tui)


def _no_file(path: Path) -> GradcheckError:
    from gradcheck_dist.errors import nearest

    near = nearest(str(path), map(str, path.parent.glob("*.yaml")))
    meant = f" Did you mean: {', '.join(near)}?" if near else ""
    return GradcheckError(
        f"there is no scenario file {path}.{meant} "
        "`gradcheck scenario --new NAME` writes one; `gradcheck scenario --list` tells what the library holds.",
        code="E601",
    )


def _run_one(
    name: str,
    library: Path | None,
    overrides: Overrides,
    keep: Path | None,
    report: Path | None,
    form: Format,
    tui: bool = False,
) -> None:
    from gradcheck_dist.scenarios.jobs import check
    from gradcheck_dist.scenarios.schema import load

    chosen = load(name, library)
    check(chosen, overrides, keep)
    from gradcheck_dist.trainer.launch import warm_up

    # torch loads in the fork server from here on, while this process loads the rest.
    warm_up()
    from gradcheck_dist.scenarios.runner import run_scenario

    folder = keep or (_temporary() if tui else None)
    is_left = keep is not None
    try:
        with telling(lambda: runs_left(keep)), Progress(f"{name}: starting") as progress:
            result = run_scenario(
                chosen, overrides, keep=folder, command=("gradcheck", *sys.argv[1:]), on_progress=progress.update
            )
        if tui and folder is not None:
            from gradcheck_dist.cli.live import open_screens

            open_screens(folder)
        is_left = is_left or bool(result.exit_code)  # what went wrong stays, as without the screens
    finally:
        if folder is not None and not is_left:
            shutil.rmtree(folder, ignore_errors=True)
    if not is_left:
        for variant in result.report.variants:
            variant.run_dir = None
    show(result.report, form)
    write_report(report, result.report)
    if result.error is not None:
        raise result.error
    if is_left and result.run_dir is not None:
        typer.echo(f"the runs are in {result.run_dir}", err=True)
    raise typer.Exit(result.exit_code)


def _temporary() -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix="gradcheck-"))


def _run_all(library: Path | None, overrides: Overrides, keep: Path | None, report: Path | None, form: Format) -> None:
    names = _names(library)
    from gradcheck_dist.trainer.launch import warm_up

    warm_up()
    from gradcheck_dist.scenarios import table
    from gradcheck_dist.scenarios.jobs import refusal
    from gradcheck_dist.scenarios.runner import run_scenario
    from gradcheck_dist.scenarios.schema import load

    rows: list[table.Row] = []
    could_not = False
    with telling(lambda: _all_left(rows, names, report, keep)), Progress("starting") as progress:
        for index, name in enumerate(names, 1):
            say = _numbered(progress, index, len(names))
            try:
                chosen = load(name, library)
                unfit = refusal(chosen, overrides)
                if unfit is not None:
                    found = [table.skipped(name, unfit)]
                else:
                    result = run_scenario(
                        chosen,
                        overrides,
                        keep=keep / name if keep is not None else None,
                        command=("gradcheck", *sys.argv[1:]),
                        on_progress=say,
                    )
                    found, could_not = table.rows(result), could_not or result.error is not None
            except Exception as error:  # one scenario must not cost the table of all others
                found, could_not = [table.refused(name, error)], True
            rows += found
            if form == Format.text:
                # Each as it comes: somebody looks on, or keeps the log of a job that may be cut short.
                progress.say("\n".join(table.lines(found)))
    if form == Format.text:
        typer.echo(table.summary(rows))
    else:
        sys.stdout.write(table.markdown(rows) if form == Format.md else table.document(rows))
    if report is not None:
        _write_table(report, rows)
    could_not = could_not or all(row.as_expected is None for row in rows)
    raise typer.Exit(2 if could_not else int(any(row.as_expected is False for row in rows)))


def _write_table(report: Path, rows: list[table.Row]) -> None:
    from gradcheck_dist.scenarios import table

    write_file(report, table.markdown(rows) if report.suffix.lower() == ".md" else table.document(rows))
    typer.echo(f"wrote {report}", err=True)


def _all_left(rows: list[table.Row], names: list[str], report: Path | None, keep: Path | None) -> str:
    """What an interrupted --all leaves: the table of what had ended, where a file was named for it."""
    if report is not None and rows:
        _write_table(report, rows)
    ended = len({row.scenario for row in rows})
    kept = f" Their runs are in {keep}." if keep is not None and rows else ""
    return f"{ended} of {len(names)} scenarios had ended.{kept}"


def _numbered(progress: Progress, index: int, count: int) -> Callable[[str], None]:
    return lambda text: progress.update(f"{index} of {count}: {text}")


def _names(folder: Path | None) -> list[str]:
    from gradcheck_dist.scenarios.schema import library

    return library(folder)


def _list(folder: Path | None, form: Format) -> None:
    from gradcheck_dist.scenarios.schema import load

    found = [load(name, folder) for name in _names(folder)]
    variants = {one.name: [variant.name for variant in one.variants] for one in found}
    if form == Format.json:
        import json

        rows = [{"name": one.name, "title": one.title, "variants": variants[one.name]} for one in found]
        typer.echo(json.dumps(rows, indent=1))
        return
    if form == Format.md:
        for one in found:
            typer.echo(f"- `{one.name}` {one.title} ({', '.join(variants[one.name])})")
        return
    width = max(map(len, variants), default=0)
    for one in found:
        typer.echo(beside(f"{one.name:<{width}} ", one.title))
        typer.echo(beside(" " * (width + 1), ", ".join(variants[one.name])))


def _new(name: str, folder: Path | None) -> None:
    from gradcheck_dist.scenarios.schema import check_name
    from gradcheck_dist.scenarios.skeleton import skeleton

    check_name(name)
    folder = folder or Path()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    if path.exists():
        raise GradcheckError(f"{path} exists already and is left as it is. Choose another name.", code="E711")
    write_file(path, skeleton(name))
    typer.echo(f"wrote {path}. To run it:", err=True)
    typer.echo(f"gradcheck scenario {name} --library {quoted(folder)}")

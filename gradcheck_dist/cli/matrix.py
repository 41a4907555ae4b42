"""gradcheck matrix"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradcheck_dist.cli.interrupted import telling
from gradcheck_dist.cli.output import TABLE_ENDINGS, Format, check_ending, check_writable, write_file
from gradcheck_dist.cli.progress import Progress
from gradcheck_dist.errors import GradcheckError

if TYPE_CHECKING:
    from gradcheck_dist.scenarios import matrix as table


def matrix(
    quick: Annotated[bool, typer.Option("--quick", help="Only the dozen that stands for all.")] = False,
    only: Annotated[
        str, typer.Option("--only", metavar="TEXT", help="Only configurations whose name holds this text.")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List the configurations and stop.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FILE", help="Keep results here; what is right there is not run again."),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table: .md or .json.")] = None,
    form: Annotated[Format, typer.Option("--format", help="How to write the result to stdout.")] = Format.text,
) -> None:
    """Run correct configurations, on which nothing may be found.

    They are of every axis. Each trains one step on this machine, is judged, and must have the gradient norm of one
    process on the same data.

    Exit codes: 0 all are clean, 1 not.
    """
    if report is not None:
        check_ending(report, TABLE_ENDINGS)
    from gradcheck_dist.scenarios import matrix as table

    chosen = [case for case in table.cases() if (case.is_quick or not quick) and only.lower() in case.name.lower()]
    if not chosen:
        of = "of the dozen of --quick" if quick else "of the matrix"
        raise GradcheckError(
            f"--only is {only!r}, which the name of no configuration {of} holds. `gradcheck matrix --list` names all.",
            code="E601",
        )
    if list_:
        typer.echo(_names([case.name for case in chosen], form))
        return
    for file in (resume, report):
        if file is not None:
            check_writable(file, kept=file is resume)
    earlier = {row.name: row for row in table.read_rows(resume)} if resume is not None else {}
    from gradcheck_dist.trainer.launch import warm_up

    warm_up()
    runner = table.Matrix()
    rows: list[table.Row] = []
    with telling(lambda: _left(rows, len(chosen), resume)), Progress("starting") as progress:
        for index, case in enumerate(chosen, 1):
            progress.update(f"{index} of {len(chosen)}: {case.name}")
            row = table.done(earlier, case) or runner.run(case)
            rows.append(row)
            if resume is not None:
                earlier[case.name] = row
                table.write_rows(resume, list(earlier.values()))
            if form == Format.text:
                progress.say(table.line(row))
    if form == Format.text:
        typer.echo(table.summary(rows))
    else:
        typer.echo(_written(rows, is_markdown=form == Format.md))
    if report is not None:
        write_file(report, _written(rows, is_markdown=report.suffix.lower() == ".md") + "\n")
        typer.echo(f"wrote {report}", err=True)
    raise typer.Exit(int(not all(row.is_right for row in rows)))


def _names(names: list[str], form: Format) -> str:
    if form == Format.json:
        import json

        return json.dumps(names, indent=1)
    return "\n".join(f"- `{name}`" if form == Format.md else name for name in names)


def _left(rows: list[table.Row], count: int, resume: Path | None) -> str:
    """What an interrupted matrix leaves."""
    on = f"They are kept in {resume}: the same command goes on." if resume is not None else "--resume FILE keeps them."
    return f"{len(rows)} of {count} configurations had ended. {on}"


def _written(rows: list[table.Row], *, is_markdown: bool) -> str:
    import json
    from dataclasses import asdict

    from gradcheck_dist.scenarios import matrix as table

    if is_markdown:
        return "\n".join(table.table(rows))
    return json.dumps({"schema_version": 1, "rows": [asdict(row) for row in rows]}, indent=2)

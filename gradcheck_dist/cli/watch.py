"""gradcheck watch RUN"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gradcheck_dist.errors import GradcheckError


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or a folder of a scenario's variants.")],
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run for the Compare screen. Default: a sibling.")
    ] = None,
    screen: Annotated[str, typer.Option(help="The screen to open first.")] = "overview",
) -> None:
    """Look at a run, live or afterwards.

    Seven screens from the verdict to the culprit's source line; d goes there at once, ? shows all keys. Reads
    traces only: it can be closed and opened again while the training goes on. Needs no torch.
    """
    if not run.is_dir():
        raise GradcheckError(
            f"there is no run folder {run}. Name a folder written by `gradcheck run --out` or "
            "`gradcheck scenario --keep`.",
            code="E751",
        )
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise GradcheckError(
            "gradcheck watch needs a terminal, and stdin or stderr is none. Use `gradcheck diagnose RUN` in scripts.",
            code="E752",
        )
    from gradcheck_dist.errors import unknown_value
    from gradcheck_dist.tui.app import SCREENS, WatchApp
    from gradcheck_dist.tui.source import FolderSource

    if screen not in SCREENS:
        raise unknown_value("screen", screen, SCREENS, code="E753")
    WatchApp(FolderSource(run, compare=compare), str(run), mode=screen).run()

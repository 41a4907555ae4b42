"""gradcheck watch RUN"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradcheck_dist.cli.places import local
from gradcheck_dist.errors import GradcheckError

LOCALHOST = "localhost"


def watch(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", parser=local("gradcheck watch"), help="Run folder, or a folder of a scenario's variants."
        ),
    ],
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            parser=local("gradcheck watch"),
            help="Another run for the Compare screen. Default: a sibling.",
        ),
    ] = None,
    screen: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The first screen: overview, weights, timeline, event, parameters, compare or explain.",
        ),
    ] = "overview",
    web: Annotated[bool, typer.Option("--web", help="Serve the screens to browsers of this machine.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Of --web.")] = 8000,
) -> None:
    """Look at a run, live or afterwards.

    Seven screens from the verdict to the culprit's source line; d goes there at once, ? shows all keys. Reads
    traces only: it can be closed and opened again while the training goes on. Needs no torch.
    """
    from gradcheck_dist.trace.run import require_folder

    if run.exists():
        require_folder(run)
    if not run.is_dir():
        raise GradcheckError(
            f"there is no run folder {run}. Name a folder written by `gradcheck run --out` or "
            "`gradcheck scenario --keep`.",
            code="E751",
        )
    from gradcheck_dist.errors import unknown_value
    from gradcheck_dist.tui.app import SCREENS, WatchApp

    if screen not in SCREENS:
        raise unknown_value("screen", screen, SCREENS, code="E753")
    if web:
        _serve(run, compare, screen, port)
        return
    served = "TEXTUAL_DRIVER" in os.environ  # below --web, where a browser is the terminal
    if not served and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise GradcheckError(
            "gradcheck watch needs a terminal, and stdin or stderr is none. Use `gradcheck diagnose RUN` in scripts.",
            code="E752",
        )
    from gradcheck_dist.tui.source import FolderSource, others_inside

    WatchApp(FolderSource(run, compare=compare), str(run), mode=screen, told=others_inside(run)).run()


def _serve(run: Path, compare: Path | None, screen: str, port: int) -> None:
    """Every browser gets a process with screens of its own; only this machine can connect."""
    try:
        from textual_serve.server import Server
    except ImportError as error:
        raise GradcheckError(
            "gradcheck watch --web needs textual-serve, which is not installed. Install it with "
            "`pip install 'gradcheck-dist[web]'`, or leave --web out.",
            code="E755",
        ) from error
    command = [sys.executable, "-m", "gradcheck_dist", "watch", str(run.absolute()), "--screen", screen]
    if compare is not None:
        command += ["--compare", str(compare.absolute())]
    try:
        Server(shlex.join(command), host=LOCALHOST, port=port, title=f"gradcheck watch {run.name}").serve()
    except OSError as error:
        raise GradcheckError(
            f"cannot serve on port {port} of {LOCALHOST}: {error.strerror or error}. Name another one with --port.",
            code="E756",
        ) from error

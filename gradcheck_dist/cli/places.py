"""Folders that have to be on this machine, for what writes a run or follows one; names as a shell takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradcheck_dist.errors import GradcheckError


def local(what: str) -> Callable[[str], Path]:
    """A parser of paths, for typer, that raises GradcheckError (E512: `what` needs a local folder) on a URL, of which
    Path would make a folder of a strange name."""

    def parse(text: str) -> Path:
        from gradcheck_dist.trace.store import refuse_url

        refuse_url(text, what)
        if not text:  # Path would take it for the working directory
            raise GradcheckError(f"{what} needs a folder, and its name is empty. Name one.", code="E512")
        return Path(text)

    return parse


def quoted(place: object) -> str:
    """As it is typed into a shell."""
    from shlex import quote

    return quote(str(place))

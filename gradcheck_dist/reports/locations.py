"""Source lines as addresses that a code host may follow."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import quote

from gradcheck_dist.reports.culprit import Culprit


def repository_path(culprit: Culprit | None) -> str | None:
    """The culprit's file as a path below the repository's root; None when it lies outside, or nobody can tell where."""
    if culprit is None or culprit.path is None:
        return None
    path = PurePosixPath(culprit.path)
    outside = path.is_absolute() or ".." in path.parts or "\\" in culprit.path or ":" in culprit.path
    return None if outside or path.suffix != ".py" else path.as_posix()


def uri(path: str) -> str:
    """A relative URI reference: every character that could be more than a name is quoted."""
    return quote(path, safe="/-._~")

"""Formats and files of results."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from gradcheck_dist.errors import GradcheckError, unknown_value

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Report, ScenarioReport


TABLE_ENDINGS = (".md", ".json")
"""Files that a table of many runs can be written to."""


class Format(StrEnum):
    """How a report is written: for people at a terminal, for scripts, as a pull request comment."""

    text = "text"
    json = "json"
    md = "md"


class DataFormat(StrEnum):
    """How figures that are no report are written."""

    text = "text"
    json = "json"


class FileFormat(StrEnum):
    """Formats of a report: for scripts, as a pull request comment, a page, and three that code hosts and CI read."""

    json = "json"
    md = "md"
    html = "html"
    sarif = "sarif"
    junit = "junit"
    github = "github"


def render(report: Report | ScenarioReport, form: Format | FileFormat) -> str:
    """A report in any format but the terminal's."""
    from gradcheck_dist.reports import formats

    return formats.write(report, form.value)


def show(report: Report | ScenarioReport, form: Format | FileFormat) -> None:
    """Write a report to stdout."""
    from gradcheck_dist.diagnosis.finding import ScenarioReport

    # A path or name that the terminal's encoding lacks must not cost the whole report.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    if form != Format.text:
        sys.stdout.write(render(report, form))
    else:
        from gradcheck_dist.reports import terminal

        if isinstance(report, ScenarioReport):
            terminal.write_scenario(report, sys.stdout)
        else:
            terminal.write_report(report, sys.stdout)
    sys.stdout.flush()


def beside(label: str, text: str) -> str:
    """A label and its text: one line where a pipe reads, folded beside the label on a terminal that is too narrow."""
    import shutil
    import textwrap

    if not sys.stdout.isatty():
        return label + text
    width = max(shutil.get_terminal_size().columns, len(label) + 20)
    return textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label))


def fold_paragraphs(text: str) -> str:
    """A page of Markdown; its paragraphs and items folded anew on a terminal that is narrower than they are."""
    import re
    import shutil
    import textwrap

    columns = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or columns >= max(map(len, text.splitlines()), default=0):
        return text

    def folded(lines: re.Match[str]) -> str:
        hang = "  " if lines[0].startswith("- ") else ""
        words = " ".join(lines[0].split())
        return textwrap.fill(words, max(columns, 20), subsequent_indent=hang, break_on_hyphens=False)

    return re.sub(r"^- .*(?:\n  \S.*)*|^[^\s#-].*(?:\n[^\s#-].*)*", folded, text, flags=re.MULTILINE)


def check_writable(path: Path, *, kept: bool = False) -> None:
    """Raise GradcheckError (E711) unless a file can be written at `path`: asked before the work, not after it. `kept`:
    it will be read again, which no device and no pipe can be."""
    if _is_stream(path):
        if kept:
            raise GradcheckError(f"cannot keep results in {path}: it is no file. Name a file.", code="E711")
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "it is a folder" if path.is_dir() else f"there is no folder {folder} that you may write to"
        raise GradcheckError(f"cannot write {path}: {reason}. Name a file in a folder that exists.", code="E711")


def check_folder(path: Path, option: str) -> None:
    """Raise GradcheckError (E711) unless `path`, which an option names, is a folder or could become one."""
    found = next((place for place in (path, *path.absolute().parents) if place.exists()), None)
    if found is not None and not found.is_dir():
        raise GradcheckError(
            f"{option} is {str(path)!r}, and {found} is a file. Name a folder, or one that is to be made.", code="E711"
        )


def make_folder(path: Path) -> None:
    """The folder that results go to, and those above it.

    Raises:
        GradcheckError: E711 it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradcheckError(
            f"cannot make the folder {path}: {error.strerror or error}. Name a folder that is none yet, or one that "
            "you may write to.",
            code="E711",
        ) from error


def check_ending(path: Path, legal: Iterable[str], option: str = "--report", otherwise: str = "") -> str:
    """The ending of the file that an option names, in small letters.

    Raises:
        GradcheckError: E711 it stands for no format; `otherwise` is what to do then beside naming another file.
    """
    suffix = path.suffix.lower()
    if suffix not in legal:
        hint = f"Name a file that ends so{f', {otherwise}' if otherwise else ''}."
        raise unknown_value(f"ending of {option}", path.suffix or path.name, legal, code="E711", hint=hint)
    return suffix


def check_report(path: Path | None) -> None:
    """Raise GradcheckError (E711) unless a report can be written at `path` in the format of its ending."""
    if path is not None:
        _format_of(path)
        check_writable(path)


def write_report(path: Path | None, report: Report | ScenarioReport) -> None:
    """Write a report in the format of the file's ending; nothing where no file was asked for."""
    if path is not None:
        write_file(path, render(report, _format_of(path)))
        print(f"wrote {path}", file=sys.stderr)


def _format_of(path: Path) -> FileFormat:
    from gradcheck_dist.reports.formats import SUFFIXES

    return FileFormat(SUFFIXES[check_ending(path, SUFFIXES)])


def _is_stream(path: Path) -> bool:
    """Whether this is a device or a pipe (/dev/stdout, /dev/null): written to, never put another file in its place."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all. A link stays, and what it leads to is written.

    Raises:
        GradcheckError: E711 it cannot be written.
    """
    import tempfile

    partial: Path | None = None
    try:
        if _is_stream(path):
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{path.name}.")
        partial = Path(name)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o666 & ~mask)
        partial.replace(target)
    except OSError as error:
        if partial is not None:
            partial.unlink(missing_ok=True)
        raise GradcheckError(
            f"cannot write {path}: {error.strerror or error}. Name a file in a folder that you may write to.",
            code="E711",
        ) from error

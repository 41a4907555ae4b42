"""Lines of the user's source around a culprit.

The file name comes out of the trace, and a trace may come from a stranger: a line is shown only from a Python file
below the working directory or beside this package, so that a report never carries other files of this machine.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import Path

from gradcheck_dist.reports.text import printable

MAX_SOURCE_BYTES = 2_000_000
MAX_SPAN = 12
"""An excerpt that is to reach from one line to another shows both only where they are as near as this."""
_PACKAGE_PARENT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Excerpt:
    """Neighbouring lines of a file; `marked` are the numbers of the lines that matter, counted from 1."""

    first_line: int
    lines: tuple[str, ...]
    marked: tuple[int, ...]

    def numbered(self) -> list[tuple[bool, int, str]]:
        """(is a marked line, line number, text) of each line."""
        numbers = range(self.first_line, self.first_line + len(self.lines))
        return [(number in self.marked, number, text) for number, text in zip(numbers, self.lines, strict=True)]


def _roots() -> list[Path]:
    return [Path.cwd().resolve(), _PACKAGE_PARENT]


def _locate(file: str) -> tuple[Path, Path] | None:
    """The real path of a source file that may be shown, and the root that it lies below."""
    if not file.endswith(".py") or "\0" in file:
        return None
    for root in _roots():
        try:
            path = (root / file).resolve()
            inside = path.relative_to(root)
            if path.is_file() and not any(part.startswith(".") for part in inside.parts):
                return path, root
        except (OSError, ValueError):
            continue
    return None


def short_path(file: str) -> str:
    """`file` relative to the working directory or to this package's parent where it lies below one, printable."""
    found = _locate(file)
    return printable(found[0].relative_to(found[1]).as_posix() if found else file, 200)


def _lines(file: str) -> list[str]:
    found = _locate(file)
    if found is None:
        return _typed_here(file)
    try:
        if found[0].stat().st_size > MAX_SOURCE_BYTES:
            return []
        return found[0].read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _typed_here(file: str) -> list[str]:
    """The lines of a notebook cell or prompt of this very process, which IPython keeps in linecache; else none.

    An entry without a modification time never came from a file, so no other file of this machine can be meant.
    """
    entry = linecache.cache.get(file)
    if entry is None or len(entry) != 4 or entry[1] is not None:
        return []
    return [text.rstrip("\n") for text in entry[2]]


def modified_s(file: str | None) -> float | None:
    """When the file was last written (unix time), None where it cannot be shown."""
    found = _locate(file) if file else None
    try:
        return found[0].stat().st_mtime if found is not None else None
    except OSError:
        return None


def line_text(file: str | None, line: int | None) -> str | None:
    """One line of source without its indent, None where it cannot be read."""
    lines = _lines(file) if file and line else []
    return lines[line - 1].strip() if line and 1 <= line <= len(lines) else None


def excerpt(file: str | None, line: int | None, context: int = 2, until: int | None = None) -> Excerpt | None:
    """The lines around `line`, common indent removed, None where the file cannot be shown. Down to the line `until`
    where that is at most MAX_SPAN lines below; both are marked then."""
    lines = _lines(file) if file and line else []
    if not line or not 1 <= line <= len(lines):
        return None
    first = max(1, line - context)
    near = until is not None and line < until <= min(line + MAX_SPAN, len(lines))
    marked = (line, until) if near and until is not None else (line,)
    shown = [text.expandtabs(4) for text in lines[first - 1 : max(line + context, marked[-1])]]
    indent = min((len(text) - len(text.lstrip()) for text in shown if text.strip()), default=0)
    return Excerpt(first, tuple(printable(text[indent:].rstrip(), 120) for text in shown), marked)

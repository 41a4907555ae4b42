"""Text that may come from a stranger's trace, made safe to print, and numbers made short to read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Control characters, terminal escapes, invisible and direction-changing characters, lone surrogates, and what XML 1.0
# has no way to write.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)


def printable(text: str, limit: int = 400) -> str:
    """`text` on one line, at most `limit` characters, with every character visible that could steer a terminal."""
    # A megabyte is cut before the work, not after it: no character becomes shorter by being made visible.
    return clip(_UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text[: limit + 1]), limit)


def prose(text: str, limit: int = 2000) -> str:
    """Like `printable` for sentences: line breaks and runs of blanks become one blank."""
    return printable(" ".join(text[: 4 * limit].split()), limit)


def by_line(text: str) -> str:
    """Like `prose` for texts of several lines, which stay apart."""
    return "\n".join(prose(line) for line in text.splitlines() if line.strip())


def clip(text: str, limit: int) -> str:
    """The first `limit` characters, the last of them an ellipsis when something was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def number(value: float | None, digits: int = 5) -> str:
    """A number with few digits, "-" where it is unknown."""
    return "-" if value is None else f"{value:.{digits}g}"


def spans(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5, 6] as "0-2, 5, 6"."""
    runs: list[list[int]] = []
    for value in sorted(set(numbers)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(_span(low, high) for low, high in runs)


def _span(low: int, high: int) -> str:
    return f"{low}-{high}" if high > low + 1 else ", ".join(map(str, range(low, high + 1)))


def some(items: Sequence[str], count: int = 3, limit: int = 80) -> str:
    """The first few of a list of names and how many more there are."""
    shown = ", ".join(printable(item, limit) for item in items[:count])
    return f"{shown} and {len(items) - count} more" if len(items) > count else shown


def data_ranks(groups: Sequence[Sequence[int]]) -> str:
    """The ranks of each data coordinate, "0,1 | 2,3"; nothing for a single rank."""
    if sum(map(len, groups)) < 2:
        return ""
    shown = [",".join(map(str, group[:8])) + (",..." if len(group) > 8 else "") for group in groups[:16]]
    return " | ".join([*shown, "..."] if len(groups) > 16 else shown)

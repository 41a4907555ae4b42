"""The one exception type that users of this package meet. Imports nothing of the project."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GradcheckError(Exception):
    """A problem that the user can mend.

    The message names the offending value, the legal values and the next step. `code` is stable and meant for
    scripts; `exit_code` is what the command line returns (2: could not run or could not judge).
    """

    def __init__(self, message: str, *, code: str = "E000", exit_code: int = 2) -> None:
        super().__init__(message)
        self.code = code
        self.exit_code = exit_code


def nearest(value: str, legal: Iterable[str], count: int = 3, cutoff: float = 0.6) -> list[str]:
    """The legal names that look most like `value`, best first; empty when none is as close as `cutoff`, from 0 to 1."""
    return difflib.get_close_matches(value, list(legal), n=count, cutoff=cutoff)


MAX_LISTED = 20


def unknown_value(what: str, value: object, legal: Iterable[str], *, code: str, hint: str = "") -> GradcheckError:
    """An error for a value outside a closed set: names the value, the nearest and all legal values, and what to do.

    `hint` tells what to do; where there are many legal values it has to tell where all are listed, in their place.
    """
    names = sorted(legal)
    close = nearest(str(value), names) or [name for name in names if len(str(value)) > 2 and str(value) in name][:3]
    lines = [f"unknown {what} {value!r}."]
    if close:
        lines.append(f"Did you mean: {', '.join(close)}?")
    if not (hint and len(names) > MAX_LISTED):
        lines.append(f"Legal values: {', '.join(names) or '(none)'}.")
    if hint:
        lines.append(hint)
    return GradcheckError(" ".join(lines), code=code)

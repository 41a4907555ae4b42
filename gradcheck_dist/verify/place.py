"""The line of a model that is being evaluated."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path

import torch

from gradcheck_dist.events import Site

_HERE = Path(__file__).parent
_FOREIGN = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, _HERE, _HERE.parent / "probes"))
_FOREIGN_FILES = (contextlib.__file__, functools.__file__)

standing_at: Site | None = None
"""Where training was, while an operation of its is run again from a record."""


def model_site() -> Site | None:
    """The innermost frame that belongs neither to torch nor to the verification; None when there is none."""
    if standing_at is not None:
        return standing_at
    frame = sys._getframe(1)
    while frame.f_back is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*_FOREIGN, "<frozen")) and code.co_filename not in _FOREIGN_FILES:
            return Site(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = frame.f_back
    return None

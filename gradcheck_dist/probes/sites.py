"""Where in the user's source something was called."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from gradcheck_dist.events import Site

_SKIP_DIRS = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))
_SKIP_FILES = {contextlib.__file__, functools.__file__, threading.__file__}


@functools.lru_cache(maxsize=4096)
def _is_foreign(filename: str) -> bool:
    return filename.startswith("<") or filename in _SKIP_FILES or filename.startswith(_SKIP_DIRS)


def caller_site() -> Site | None:
    """The innermost frame that belongs neither to torch nor to the probes; None when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_foreign(code.co_filename):
            return Site(code.co_filename, frame.f_lineno, code.co_qualname)
        frame = frame.f_back
    return None

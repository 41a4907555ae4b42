"""Where in the user's source something was called."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import typing_extensions

from gradcheck_dist.events import Site

OWN_DIRS = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(__file__).parents[2] / "verify"))
TORCH_DIR = str(Path(torch.__file__).parent) + os.sep
_SKIP_DIRS = (TORCH_DIR, *OWN_DIRS)
_INSTALLED_DIRS = tuple(
    path + os.sep for name in ("purelib", "platlib", "stdlib", "platstdlib") if (path := sysconfig.get_path(name))
)
_PACKAGES = {"site-packages", "dist-packages"}
"""Names of folders that hold installed packages of other schemes, too: a user's own, Debian's, one on PYTHONPATH."""
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')
_DEFINES = ("def ", "async def ")
MAX_DECORATORS = 10
"""Lines below which no definition is looked for."""
_TYPED = ("<ipython-input", "<stdin>")
_SKIP_FILES = {contextlib.__file__, functools.__file__, threading.__file__, typing_extensions.__file__}
"""The last wraps what torch calls deprecated (reduce_scatter_tensor)."""


@functools.lru_cache(maxsize=4096)
def _is_foreign(filename: str) -> bool:
    if filename.startswith("<"):
        return not filename.startswith(_TYPED)
    return filename in _SKIP_FILES or filename.startswith(_SKIP_DIRS)


@functools.lru_cache(maxsize=4096)
def is_installed(filename: str) -> bool:
    return filename.startswith(_INSTALLED_DIRS) or not _PACKAGES.isdisjoint(Path(filename).parts)


def caller_site() -> Site | None:
    """The innermost frame that belongs neither to torch nor to the probes; None when there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    called_from = _users_line(frame) if is_installed(code.co_filename) else None
    return Site(code.co_filename, frame.f_lineno, code.co_qualname, called_from)


def caller_instruction() -> tuple[Site, CodeType, int] | None:
    """What called a replaced method, as its site and the byte of the instruction in its function's code; None where
    that is torch itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_DIRS):
        frame = frame.f_back
    if frame is None or _is_foreign(frame.f_code.co_filename):
        return None
    site = caller_site()
    return None if site is None else (site, frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def place_of(code: CodeType, offset: int) -> tuple[int | None, ...]:
    """(line, last line, column, last column) of the instruction at a byte of a function's code (PEP 657)."""
    return next(itertools.islice(code.co_positions(), max(offset, 0) // 2, None), ())


def calls() -> tuple[tuple[CodeType, tuple[int | None, ...]], ...]:
    """From which place of which function each of the user's and of its libraries' calls that are under way was made.
    Two calls on one line are two places."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_foreign(frame.f_code.co_filename):
            found.append((frame.f_code, place_of(frame.f_code, frame.f_lasti)))
        frame = frame.f_back
    return tuple(found)


def site_in(stack_trace: str) -> Site | None:
    """What `caller_site` gives, of a stack that was noted earlier as text, the innermost frame last."""
    frames = [(file, int(line), name) for file, line, name in _FRAME.findall(stack_trace) if not _is_foreign(file)]
    if not frames:
        return caller_site()
    file, line, name = frames[-1]
    if not is_installed(file):
        return Site(file, line, name)
    users = [f"{other}:{number}" for other, number, _ in frames if not is_installed(other)]
    return Site(file, line, name, users[-1] if users else _users_line(sys._getframe(1)))


def defined_at(function: Any) -> Site | None:
    """Where a function is written, below its decorators; None where that is not in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None:
        return None
    first: int = code.co_firstlineno
    below = range(first, first + MAX_DECORATORS)
    line = next((at for at in below if linecache.getline(code.co_filename, at).lstrip().startswith(_DEFINES)), first)
    return Site(code.co_filename, line, code.co_qualname)


def _users_line(frame: FrameType | None) -> str | None:
    """ "file:line" of the innermost frame at or above `frame` that belongs to no installed package."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_foreign(name) and not is_installed(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None

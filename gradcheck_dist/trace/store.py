"""Where a run folder lies: in a local folder, or in any store that fsspec opens (s3://, gs://, zip://, memory://).

Reading needs a few questions only: what lies in a folder, how large it is, these bytes of it. A local folder answers
them as a `pathlib.Path` does and never loads fsspec; what a URL means and who may read it is fsspec's business.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any

from gradcheck_dist.errors import GradcheckError

MAX_REQUESTS = 32
"""Requests to an object store under way at a time: each waits some 30 ms, whatever the store can deliver."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_SECRET = re.compile(r"(://[^/:@\s]*):[^/@\s]*@")


@dataclass(frozen=True)
class RemotePath:
    """A folder or file in a store: as much of `pathlib.Path` as reading a run takes. Travels between processes.

    Every method raises GradcheckError, E513, where the store refuses or cannot be reached.
    """

    fs: Any
    path: str
    url: str
    size: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return _SECRET.sub(r"\1:***@", self.url)

    def __truediv__(self, name: str) -> RemotePath:
        first, *chained = self.url.split("::")
        url = "::".join([first + name if first.endswith("/") else f"{first}/{name}", *chained])
        path = f"{self.path.rstrip('/')}/{name}" if self.path else name
        return RemotePath(self.fs, path, url)

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2] or self.url.split("::")[-1].rstrip("/").rpartition("/")[2]

    def resolve(self) -> RemotePath:
        return self

    def is_dir(self) -> bool:
        with _asking(self):
            return bool(self.fs.isdir(self.path))

    def is_file(self) -> bool:
        with _asking(self):
            return self.size is not None or bool(self.fs.isfile(self.path))

    def iterdir(self) -> Iterator[RemotePath]:
        with _asking(self):
            found = self.fs.ls(self.path, detail=True)
        for entry in found:
            child = self / str(entry["name"]).rstrip("/").rpartition("/")[2]
            yield RemotePath(self.fs, child.path, child.url, entry.get("size") if entry["type"] == "file" else None)

    def num_bytes(self) -> int:
        """The size of the file."""
        with _asking(self):
            return int(self.fs.size(self.path) if self.size is None else self.size)

    def read_text(self, encoding: str = "utf-8") -> str:
        """
        Raises:
            OSError: there is no such file.
        """
        return self.read_bytes().decode(encoding)

    def read_bytes(self) -> bytes:
        """
        Raises:
            OSError: there is no such file.
        """
        if not self.is_file():
            raise FileNotFoundError(str(self))
        with _asking(self):
            return bytes(self.fs.cat_file(self.path))


Place = Path | RemotePath
"""A run folder or a file in it, wherever it lies."""
Where = str | os.PathLike[str] | RemotePath
"""How a caller names one: a path or a URL."""


def is_url(place: object) -> bool:
    """Whether this names something in a store of fsspec: `protocol://...` or `protocol::...`."""
    return isinstance(place, str) and _URL.match(place) is not None


def place_of(place: Where) -> Place:
    """A path, or the folder in a store that a URL names. `file://` is a path like others.

    Raises:
        GradcheckError: E504 the name is empty; E513 fsspec or a package that it needs is missing, or nobody knows the
            protocol.
    """
    if isinstance(place, RemotePath):
        return place
    if not isinstance(place, str) or not is_url(place):
        if place == "":  # Path would take it for the working directory
            raise GradcheckError(
                "the name of the run folder is empty. Name a folder written by `gradcheck run --out` or `gradcheck "
                "scenario --keep`.",
                code="E504",
            )
        return Path(place)
    shown = _SECRET.sub(r"\1:***@", place)
    try:
        import fsspec
    except ImportError as error:
        raise GradcheckError(
            f"reading {shown} needs fsspec, which is not installed. Install it with "
            "`pip install 'gradcheck-dist[remote]'`, or copy the run folder to this machine.",
            code="E513",
        ) from error
    try:
        fs, path = fsspec.url_to_fs(place)
    except ImportError as error:  # it names the package
        raise GradcheckError(
            f"cannot open {shown}: {error}. Install that package with pip, or copy the run folder to this machine.",
            code="E513",
        ) from error
    except ValueError as error:
        raise GradcheckError(
            f"cannot open {shown}: {error}. Name a local folder, or a URL that fsspec opens, such as s3://, gs://, "
            "abfs://, hf://, https:// or sftp://.",
            code="E513",
        ) from error
    except Exception as error:
        raise _refused(shown, error) from error
    if isinstance(fs.protocol, tuple) and "file" in fs.protocol and "::" not in place:
        return Path(path)
    return RemotePath(fs, path, place)


def size_of(place: Place) -> int:
    """Bytes of a file."""
    return place.num_bytes() if isinstance(place, RemotePath) else place.stat().st_size


def refuse_url(place: object, what: str) -> None:
    """Raise GradcheckError (E512) where `what`, which needs a local folder, was given a URL."""
    if is_url(place):
        shown = _SECRET.sub(r"\1:***@", str(place))
        raise GradcheckError(
            f"{what} needs a local folder, and {shown} is a URL. Name a local one; `gradcheck diagnose` and `gradcheck "
            "report` read runs in any store.",
            code="E512",
        )


FORBIDDEN = "may not be read by this user"


def forbidden(path: object) -> GradcheckError:
    """E507: it is there, and this user may not read it."""
    return GradcheckError(
        f"{path} {FORBIDDEN}. Make it readable (chmod a+rX), or read it as the user who recorded it.",
        code="E507",
    )


class LocalFile:
    """A file read piece by piece. It is open only while it is read: a run may have more ranks than a process files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, offset: int, num_bytes: int | None, *, ahead: bool = True) -> bytes:
        """At most `num_bytes` from `offset`, all where None. `ahead`: more will be read behind them.

        Raises:
            GradcheckError: E507 this user may not read it.
        """
        try:
            with open(self._path, "rb") as file:
                file.seek(offset)
                return file.read() if num_bytes is None else file.read(num_bytes)
        except PermissionError as error:
            raise forbidden(self._path) from error

    def expect(self, num_bytes: int) -> None:
        """Get what will be read next while nobody waits for it."""


class RemoteFile:
    """A file in a store, read forwards: of an object store the next piece is on its way while this one is judged."""

    def __init__(self, place: RemotePath) -> None:
        self._place = place
        self._is_object = bool(getattr(place.fs, "async_impl", False))
        self._start, self._data = 0, b""
        self._next: Future[bytes] | None = None
        self._handle: IO[bytes] | None = None

    def read(self, offset: int, num_bytes: int | None, *, ahead: bool = True) -> bytes:
        """At most `num_bytes` from `offset`, all where None. `ahead`: more will be read behind them."""
        if not self._start <= offset <= self._end:
            self._start, self._data, self._next = offset, b"", None
        self._data, self._start = self._data[offset - self._start :], offset
        behind = self.size if num_bytes is None else min(offset + num_bytes, self.size)
        if self._end < behind and self._next is not None:
            self._data += self._next.result()
            self._next = None
        if self._end < behind:
            self._data += self._fetch(self._end, behind)
        if ahead and num_bytes is not None:
            self.expect(num_bytes)
        return self._data[: behind - offset]

    def expect(self, num_bytes: int) -> None:
        """Get what will be read next while nobody waits for it."""
        behind = min(self._end + num_bytes, self.size)
        if self._is_object and self._next is None and self._end < behind:
            self._next = _requests().submit(self._fetch, self._end, behind)

    @cached_property
    def size(self) -> int:
        return self._place.num_bytes()

    @property
    def _end(self) -> int:
        return self._start + len(self._data)

    def _fetch(self, start: int, end: int) -> bytes:
        fs, path = self._place.fs, self._place.path
        with _asking(self._place):
            if self._is_object:
                return bytes(fs.cat_file(path, start=start, end=end))
            if self._handle is None:  # an archive unpacks from the front: kept open, it goes on where it was
                self._handle = fs.open(path, "rb")
            self._handle.seek(start)
            return self._handle.read(end - start)


def open_file(place: Place) -> LocalFile | RemoteFile:
    """A file to be read piece by piece."""
    return RemoteFile(place) if isinstance(place, RemotePath) else LocalFile(place)


def read_ranges(wanted: Sequence[tuple[Place, int, int]]) -> list[bytes]:
    """Bytes of files, each as (place, start, end); of a store many at a time.

    Raises:
        OSError: a local file cannot be read.
    """
    if any(isinstance(place, RemotePath) for place, _, _ in wanted):
        return list(_requests().map(_read_range, *zip(*wanted, strict=True)))
    return [_read_range(*one) for one in wanted]


def _read_range(place: Place, start: int, end: int) -> bytes:
    return open_file(place).read(start, end - start, ahead=False)


@cache
def _requests() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="gradcheck-store")


@contextlib.contextmanager
def _asking(place: RemotePath) -> Iterator[None]:
    """What goes wrong in a store, in words: each has exceptions of its own."""
    try:
        yield
    except GradcheckError:
        raise
    except Exception as error:
        raise _refused(str(place), error) from error


def _refused(shown: str, error: Exception) -> GradcheckError:
    return GradcheckError(
        f"cannot read {shown}: {type(error).__name__}: {error}. Is the URL right, and are you allowed to read there? "
        "Credentials are looked for where the store's own package does (fsspec names it).",
        code="E513",
    )

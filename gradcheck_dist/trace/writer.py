"""The writing end of a trace: append records, write whole frames, never fail the caller."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import AnyRecord, Backward, Header, Loss, ProbeError, Record, StepShape
from gradcheck_dist.trace.frames import MAGIC, Encoder, head

FLUSH_INTERVAL_S = 0.05


def trace_path(run_dir: str | os.PathLike[str], rank: int, restart: int = 0) -> Path:
    """The trace file of a rank. An elastic restart writes its own file and never touches an earlier one."""
    suffix = f".{restart}" if restart else ""
    return Path(run_dir) / f"rank-{rank:05d}{suffix}.trace"


class TraceWriter:
    """Collects records and writes them as frames: at `flush()`, and every 50 ms by a daemon thread.

    A write that fails (full disk, read-only folder) closes the trace and is kept in `error`: nothing is raised into
    training. A forked child (data-loader worker) shares nothing: its copy of the writer stays silent.
    """

    def __init__(self, path: Path, header: Header, *, background: bool = True) -> None:
        self._prepare(path)
        self._open(path, header, background)

    def _prepare(self, path: Path) -> None:
        self.path = path
        self.error: Exception | None = None
        self.num_bytes = 0
        self._records: list[Record] = []
        self._encoder = Encoder()
        self._lock = threading.RLock()  # a signal's handler may detach in the midst of a write of the same thread
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._fd = -1

    def _open(self, path: Path, header: Header, background: bool) -> None:
        self.path, self._pid = path, os.getpid()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._write(MAGIC)
        self._records.insert(0, header)
        self.flush()
        if background:
            threading.Thread(target=self._flush_regularly, name="gradcheck-trace", daemon=True).start()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that writes. The locks here may then be held for good, by a
        thread that only the other one has."""
        return self._fd >= 0 and self._pid != os.getpid()

    def append(self, record: AnyRecord) -> None:
        self._records.append(record)

    def flush(self) -> None:
        """Write everything appended so far as one frame."""
        if self._pid != os.getpid():
            self._records = []  # a child that trains on keeps nothing of what it may not write
            return
        with self._lock:
            records, self._records = self._records, []
            if not records or self.error is not None:
                return
            payload = self._encode(records)
            self._write(head(payload), payload)

    def close(self) -> None:
        if self.is_inherited:
            return
        self._stop.set()
        self.flush()
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _encode(self, records: list[Record]) -> bytes:
        """All records. The others are not lost with one that cannot be encoded, which is told in its place."""
        try:
            return self._encoder.encode(records)
        except (TypeError, ValueError, OverflowError):
            return self._encoder.encode([msgspec.Raw(self._encode_one(record)) for record in records])

    def _encode_one(self, record: Record) -> bytes:
        try:
            return self._encoder.encode(record)
        except (TypeError, ValueError, OverflowError) as error:
            message = f"a record ({type(record).__name__}) could not be written: {type(error).__name__}: {error}"[:500]
            seq, t_ns, step = (_sound(getattr(record, name, 0)) for name in ("seq", "t_ns", "step"))
            return self._encoder.encode(ProbeError(seq=seq, t_ns=t_ns, step=step, probe="trace", message=message))

    def _write(self, *parts: bytes) -> None:
        """Write parts one behind the other, without laying them together first."""
        try:
            written = os.writev(self._fd, parts)
            self.num_bytes += written
            if written < sum(map(len, parts)):
                view = memoryview(b"".join(parts))[written:]
                while view:
                    written = os.write(self._fd, view)
                    self.num_bytes += written
                    view = view[written:]
        except OSError as error:
            self.error = error

    def _flush_regularly(self) -> None:
        while not self._stop.wait(FLUSH_INTERVAL_S):
            if self._records:
                self.flush()


def _sound(number: object) -> int:
    """A number of a record that could not be written, which may be the reason."""
    return number if isinstance(number, int) and 0 <= number < 1 << 48 else 0


class DeferredTraceWriter(TraceWriter):
    """Opens its file with the first loss or backward pass that trains: before, the rank may not be known.

    A process that trains nothing (a launcher, a helper that imports torch) leaves no file. A fork before the first
    pass may open its own. When the file cannot be opened, `refused` is told once and nothing more is kept.
    """

    def __init__(self, locate: Callable[[], tuple[Path, Header]], refused: Callable[[Exception], None]) -> None:
        self._prepare(Path(os.devnull))
        self._locate, self._refused = locate, refused
        self._deferred = True

    def append(self, record: AnyRecord) -> None:
        super().append(record)
        if self._deferred and (
            isinstance(record, Backward | StepShape) or (isinstance(record, Loss) and record.requires_grad)
        ):
            self._deferred = False
            try:
                self._open(*self._locate(), True)
            except (OSError, GradcheckError) as error:
                self.error = error
                self._refused(error)

    def flush(self) -> None:
        if not self._deferred:
            super().flush()

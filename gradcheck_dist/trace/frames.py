"""Frames: the outermost layer of a trace file.

    file  = MAGIC frame*
    frame = MARK  u32 length  u32 crc32(payload)  payload          (little endian)

A payload is a msgpack list of records (events.py). The mark lets a reader find the next whole frame behind damage.
"""

from __future__ import annotations

import operator
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from gradcheck_dist.utf8 import encodable

MAGIC = b"GCTRACE\n"
MARK = b"\xf7GC\x01"
_HEAD = struct.Struct("<4sII")
HEAD_BYTES = _HEAD.size
MAX_PAYLOAD_BYTES = 1 << 30


@dataclass(frozen=True)
class Damage:
    """Bytes that could not be read: where, how many, and why. `since` is the step that was recorded just before: of it
    and of later ones records may be lost."""

    offset: int
    num_bytes: int
    reason: str
    since: int = 0

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes at byte {self.offset}: {self.reason}"


def head(payload: bytes) -> bytes:
    """What stands before `payload` in its frame."""
    return _HEAD.pack(MARK, len(payload), zlib.crc32(payload))


def frame(payload: bytes) -> bytes:
    """One frame around `payload`."""
    return head(payload) + payload


def _try_frame(data: memoryview, offset: int) -> tuple[memoryview | None, int, str]:
    """The payload at `offset`, the offset behind it, and why there is none."""
    if len(data) - offset < _HEAD.size:
        return None, offset, "cut inside a frame header"
    mark, length, checksum = _HEAD.unpack_from(data, offset)
    if mark != MARK:
        return None, offset, "no frame begins here"
    start = offset + _HEAD.size
    if length > MAX_PAYLOAD_BYTES or len(data) - start < length:
        return None, offset, f"frame of {length} bytes is cut after {len(data) - start}"
    payload = data[start : start + length]
    if zlib.crc32(payload) != checksum:
        return None, offset, "checksum differs"
    return payload, start + length, ""


def iter_frames(data: bytes, offset: int = 0, *, more: bool = False) -> Iterator[tuple[memoryview | Damage, int]]:
    """All whole payloads from `offset` and a Damage for every stretch that is none, each with the offset behind it.

    The last Damage may be a frame that is still being written: a live reader waits and tries again from its offset.
    `more`: the file goes on behind `data`, so a frame that is cut there is left out and not searched for others.
    """
    view = memoryview(data)
    while offset < len(view):
        payload, behind, reason = _try_frame(view, offset)
        if payload is None and more and "cut" in reason and view[offset : offset + len(MARK)] == MARK:
            return
        if payload is None:
            behind = _next_frame(data, view, offset + 1)
            yield Damage(offset, behind - offset, reason), behind
        else:
            yield payload, behind
        offset = behind


def payload_in(data: bytes | memoryview, offset: int) -> memoryview | None:
    """The payload of the whole frame at `offset`; None where there is none."""
    return _try_frame(memoryview(data), offset)[0]


def _next_frame(data: bytes, view: memoryview, search: int) -> int:
    """Where the next whole frame begins, or the end of the data."""
    while (search := data.find(MARK, search)) >= 0:
        if _try_frame(view, search)[0] is not None:
            return search
        search += 1
    return len(view)


class Encoder:
    """Encodes records. Whole numbers of numpy's and others' types are written as int: a trainer may have made its
    process groups from an array of ranks. Bytes of a script's name that are no UTF-8 are written as escapes."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=operator.index)

    def encode(self, records: Any) -> bytes:
        """Raises TypeError, ValueError or OverflowError for what msgpack cannot hold."""
        try:
            return self._encoder.encode(records)
        except UnicodeEncodeError:
            plain = msgspec.to_builtins(records, builtin_types=(bytes, bytearray, memoryview), enc_hook=operator.index)
            return self._encoder.encode(encodable(plain))

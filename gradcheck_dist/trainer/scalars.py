"""Scalars for TensorBoard, written without importing it (0.2 s). Imports no torch.

Sources: tensorboard/compat/proto/event.proto and summary.proto for the fields, tensorflow's record_writer for the
framing (length, masked CRC-32C of it, payload, masked CRC-32C of it), RFC 3720 appendix B.4 for CRC-32C.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path


class ScalarWriter:
    """One event file in a folder that `tensorboard --logdir` reads. Each write reaches the file at once."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.gradcheck.{os.getpid()}"
        self._file = open(Path(folder) / name, "xb", buffering=0)  # noqa: SIM115
        self._append(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one value a tag at a step, which is not negative."""
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._append(_double(1, time.time()) + b"\x10" + _varint(step) + _bytes(5, summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))


def num_written(folder: str | os.PathLike[str]) -> int:
    """How many times `write` was called into a folder so far, also while it is written; 0 where there is no file."""
    count = 0
    for path in Path(folder).glob("events.out.tfevents.*"):
        with open(path, "rb") as file:
            size, at = os.fstat(file.fileno()).st_size, 0
            while at + 8 <= size:
                file.seek(at)
                (length,) = struct.unpack("<Q", file.read(8))
                at += 8 + 4 + length + 4
                count += at <= size
        count -= count > 0  # the first record is the file's version
    return count


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return bytes([field << 3 | 5]) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _table_entry(index: int) -> int:
    for _ in range(8):
        index = index >> 1 ^ (0x82F63B78 if index & 1 else 0)
    return index


_TABLE = [_table_entry(index) for index in range(256)]


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

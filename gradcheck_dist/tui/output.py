"""What the watched command prints, as far as `gradcheck run --live` keeps it in the run folder."""

from __future__ import annotations

import re
from pathlib import Path

LOG_NAME = "output.log"
MAX_LINES = 20_000
MAX_BYTES = 1 << 22
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]")


class Output:
    """Reads a log on as it grows. `lines` are the last MAX_LINES; a progress bar is its newest state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        self._offset = 0
        self._open = ""

    def poll(self) -> bool:
        """Read what was written since; True when there was anything."""
        try:
            size = self.path.stat().st_size
            if size == self._offset:
                return False
            with open(self.path, "rb") as file:
                if size < self._offset or size - self._offset > MAX_BYTES:
                    self._offset, self._open = max(0, size - MAX_BYTES), ""
                file.seek(self._offset)
                data = file.read(MAX_BYTES)
        except OSError:
            return False
        self._offset += len(data)
        done = self.lines[:-1] if self._open and self.lines else self.lines
        *whole, self._open = (self._open + data.decode("utf-8", "replace")).split("\n")
        self.lines = [*done, *map(_last_state, whole), *([_last_state(self._open)] if self._open else [])][-MAX_LINES:]
        return True


def _last_state(line: str) -> str:
    """What a terminal would show of a line at its end: behind the last carriage return, without colours."""
    return _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2])

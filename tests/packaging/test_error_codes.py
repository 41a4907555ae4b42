"""Error codes are for scripts: each belongs to one room, so that none gets two meanings by accident."""

from __future__ import annotations

import re
from pathlib import Path

import gradcheck_dist

PACKAGE = Path(gradcheck_dist.__file__).parent
ROOMS = {
    "1": {"axes.py"},
    "2": {"trainer"},
    "3": {"probes"},
    "4": {"ledger", "diagnosis", "stream", "objectives.py"},
    "5": {"trace", "stream"},
    "6": {"scenarios"},
    "7": {"reports", "cli", "tui", "steps.py"},
    "8": {"predict"},
    "9": {"compare", "notebook.py", "interactive.py"},
}
# Raised where the same thing goes wrong on another way: recorded data and folders, an unnamed scenario.
SHARED = {"E511", "E512", "E601", "E803"}


def test_every_error_code_belongs_to_one_room() -> None:
    strangers = []
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0]
        for code in re.findall(r'"(E\d{3})"', file.read_text()):
            if code not in SHARED and code != "E000" and room not in ROOMS.get(code[1], set()):
                strangers.append(f"{code} in {file.relative_to(PACKAGE)}")
    assert strangers == []

"""What Ctrl-C leaves behind, and how to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gradcheck_dist.cli.places import quoted


@contextmanager
def telling(left: Callable[[], str]) -> Iterator[None]:
    """Inside of it Ctrl-C has a message: what is left of the work, asked for at that moment. `main` prints it."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(left()) from None


def runs_left(folder: Path | None) -> str:
    """What there is to judge below the folder of a scenario's runs."""
    if folder is None:
        return "nothing was kept. --keep DIR keeps the runs."
    from gradcheck_dist.trace.run import trace_files

    recorded = [path for path in sorted(folder.glob("*")) if path.is_dir() and trace_files(path)]
    if not recorded:
        return "nothing was recorded yet."
    latest = max(recorded, key=lambda path: path.stat().st_mtime)
    return f"what was recorded is in {folder}. For example: gradcheck diagnose {quoted(latest)}"

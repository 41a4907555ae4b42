"""Run folders and a source that stands still."""

from __future__ import annotations

from pathlib import Path

import pytest
from still_source import first_snapshot
from tiny_runs import write_run

from gradcheck_dist.tui.snapshot import Snapshot


@pytest.fixture(scope="session")
def faulty_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that reduce too often, with a healthy twin beside it."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "fixed", fault=None)
    return write_run(folder / "faulty", fault="repeated", steps=3)


@pytest.fixture(scope="module")
def snapshot(faulty_run: Path) -> Snapshot:
    return first_snapshot(faulty_run)

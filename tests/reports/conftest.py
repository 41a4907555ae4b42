"""Run folders with a fault and with its fix, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from small_runs import write_run

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import Run, read_run


@pytest.fixture(scope="session")
def faulty_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "faulty", op="avg")


@pytest.fixture(scope="session")
def fixed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "fixed", op="sum")


@pytest.fixture(scope="session")
def faulty(faulty_dir: Path) -> tuple[Report, Run]:
    run = read_run(faulty_dir)
    return diagnose(run), run


@pytest.fixture(scope="session")
def fixed(fixed_dir: Path) -> tuple[Report, Run]:
    run = read_run(fixed_dir)
    return diagnose(run), run


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    if chromium.PROGRAM is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    found = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()

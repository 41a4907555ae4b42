"""Models on devices that are no CPU, and over two of them in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cards
import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(cards.COMPILER is None, reason="no C++ compiler: the devices cannot be built"),
]
TRAINER = Path(__file__).parent / "card_trainer.py"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cards.build(tmp_path_factory.mktemp("cards"))


def trained(*args: str) -> str:
    path = os.pathsep.join([str(Path(cards.__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(TRAINER), *args],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.rpartition("trained ")[2].strip()


@pytest.mark.parametrize(
    "case", ["one card", "two cards", "card and host", "one card, in chunks", "two cards, in chunks"]
)
def test_trainers_are_judged_wherever_they_lie(case: str, library: Path, tmp_path: Path) -> None:
    """Samples of several devices were laid end to end, which failed: right ones over a card and the host were GS401."""
    for fault, codes in (("right", []), ("fault", ["GS303"])):
        run = tmp_path / fault
        assert trained(str(library), case, str(run), fault) == trained(str(library), case, "-", fault)
        report = diagnose(read_run(run))
        assert ([finding.code for finding in report.findings], report.reasons) == (codes, [])
        assert report.coverage.problems == []
        assert report.coverage.parameters_observed == report.coverage.parameters_total == 7

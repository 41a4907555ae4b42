"""Ranks that hold rows of their own, of which some began as one number everywhere, hold no copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def judged(folder: Path, how: str) -> Report:
    run = folder / "run"
    launch("own_rows_workers:train", (str(run), how), 2, timeout_s=60)
    return diagnose(read_run(run))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("unseen", "hold different models"),
        ("mean", "hold parameters of their own alone"),
        ("", "weighs x 2 of what it would in their average"),
    ],
)
def test_rows_that_began_as_one_number_are_no_copies(tmp_path: Path, how: str, reason: str) -> None:
    """Also where an optimizer is the first to show them, and has moved some by its step before the next pass."""
    report = judged(tmp_path, how)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(reason in one for one in report.reasons), report.reasons

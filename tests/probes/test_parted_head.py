"""A head whose parts get whole gradients, behind a gather that undoes the average over ranks, is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


@pytest.mark.parametrize("how", ["", "one seed"])
def test_parts_of_a_head_are_not_accused_of_the_average_of_the_others(tmp_path: Path, how: str) -> None:
    """Also where all parts were drawn from one seed, and look like copies."""
    off = launch("parted_head_workers:train", (str(tmp_path / "run"), how), 2, timeout_s=60)
    assert max(off) < 1e-6
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("its own part of a head" in reason for reason in report.reasons), report.reasons


def test_an_average_that_nothing_undoes_is_found(tmp_path: Path) -> None:
    off = launch("parted_head_workers:train", (str(tmp_path / "run"), "once"), 2, timeout_s=60)
    assert max(off) == pytest.approx(0.5, rel=1e-4)
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert finding.factor.observed in (pytest.approx(2), pytest.approx(0.5))

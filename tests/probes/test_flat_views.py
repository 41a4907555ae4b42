"""Gradients that lie in one flat buffer, a part of which a line leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

WORKER = Path(__file__).with_name("flat_view_workers.py")


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def trained(folder: Path, variant: str) -> Report:
    launch("flat_view_workers:train", (str(folder), variant), 2, timeout_s=60)
    return diagnose(read_run(folder))


def test_what_is_unscaled_in_one_buffer_is_right(tmp_path: Path) -> None:
    assert trained(tmp_path, "all").verdict == "clean"


def test_what_a_line_leaves_out_that_unscales_the_others_is_told_with_that_line(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, "some").findings
    lines = WORKER.read_text().splitlines()
    unscales = next(at for at, line in enumerate(lines, 1) if line.strip() == "flat[:num_first] /= SCALE")
    assert finding.factor.observed == pytest.approx(1024, rel=1e-4)
    assert f"{WORKER.name}:{unscales} multiplies other gradients by 0.000976562" in finding.explanation
    assert "reduce event" not in finding.explanation

"""A broadcast that overwrites gradients is a line that writes to them, on the ranks that receive."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

WORKER = Path(__file__).with_name("sent_gradient_workers.py")


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def trained(folder: Path, variant: str) -> Report:
    launch("sent_gradient_workers:train", (str(folder), variant), 2, timeout_s=60)
    return diagnose(read_run(folder))


def test_the_line_that_sends_one_ranks_gradients_to_all_is_told(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, "alone").findings
    lines = WORKER.read_text().splitlines()
    sends = next(at for at, line in enumerate(lines, 1) if line.strip() == "dist.broadcast(parameter.grad, 0)")
    assert finding.pattern == "contributions of data rank 1 x 0, the rest x 1"
    assert f"{WORKER.name}:{sends} writes to it" in finding.explanation


def test_a_sum_that_one_rank_sends_to_all_is_right(tmp_path: Path) -> None:
    assert trained(tmp_path, "reduced").verdict == "clean"

"""Trainers of two ranks as people write them: judged as an expert would, and left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

EXPECTED = {
    "hooks": ("clean", []),
    "flat": ("clean", []),
    "flat, wrong divisor": ("findings", ["GS000"]),
    "gathered": ("clean", []),
    "gathered, the first taken": ("findings", ["GS000"]),
    "composable, averaged twice": ("findings", ["GS101"]),
    "overlapped": ("clean", []),
    "overlapped, one left out": ("findings", ["GS103"]),
    "squared": ("undetermined", []),
    "squared, never reduced": ("findings", ["GS103"]),
}


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


@pytest.mark.parametrize("variant", EXPECTED)
def test_a_trainer_is_judged_as_an_expert_would_and_left_alone(variant: str, tmp_path: Path) -> None:
    plain = launch("red_team_workers:train", (variant, None), 2, timeout_s=60)
    recorded = launch("red_team_workers:train", (variant, str(tmp_path / "run")), 2, timeout_s=60)
    assert recorded == plain
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, [finding.code for finding in report.findings]) == EXPECTED[variant]
    if variant == "gathered, the first taken":
        (finding,) = report.findings
        assert (finding.ranks, finding.first_event and finding.first_event.unrecorded) == ([0, 1], True)
        assert finding.pattern.startswith("contributions of data rank(s) 1 x 0, the rest x ")
    if variant == "squared":
        assert {round(weight.observed or 0, 6) for weight in report.weights} == {0.5}  # what DDP's average leaves

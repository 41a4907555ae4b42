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
    "flat, divided before": ("clean", []),
    "flat, divided before, averaged twice": ("findings", ["GS101"]),
    "flat, not written back": ("findings", ["GS103"]),
    "flat, divided before, not written back": ("findings", ["GS103"]),
    "flat, written back and once more for a look": ("clean", []),
    "flat, rates on one rank": ("findings", ["GS000"]),
    "gathered": ("clean", []),
    "gathered, the first taken": ("findings", ["GS000"]),
    "composable, averaged twice": ("findings", ["GS101"]),
    "overlapped": ("clean", []),
    "overlapped, one left out": ("findings", ["GS103"]),
    "overlapped, main_grad": ("clean", []),
    "overlapped, main_grad, twice": ("findings", ["GS102"]),
    "distilled": ("undetermined", []),
    "halved later": ("findings", ["GS303"]),
    "divided at first": ("findings", ["GS000"]),
    "squared": ("clean", []),
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
        assert finding.pattern.startswith("contributions of data rank 1 x 0, the rest x ")
    if variant == "flat, divided before, averaged twice":
        event = report.findings[0].first_event
        lines = Path(__file__).with_name("red_team_workers.py").read_text().splitlines()
        assert event is not None and event.line is not None
        assert lines[event.line - 1].strip() == "buffer.div_(divisor)"
    if "not written back" in variant:
        event = report.findings[0].first_event
        lines = Path(__file__).with_name("red_team_workers.py").read_text().splitlines()
        assert event is not None and event.line is not None
        assert lines[event.line - 1].strip() == "dist.all_reduce(buffer)"
        assert "is not in them" in report.findings[0].explanation
    if variant == "distilled":
        assert any(
            "0.5 x stands before the loss" in why and "meant to divide by ranks" in why for why in report.reasons
        )
    if variant in ("halved later", "divided at first"):
        (finding,) = report.findings
        factor = 0.5 if variant == "halved later" else 2.0
        assert (finding.steps, finding.first_event and finding.first_event.kind) == ([1], "loss")
        assert finding.factor.observed == pytest.approx(factor)
        assert "in step 0, whose weights are right" in finding.explanation
        assert ("red_team_workers.py" in finding.explanation) == (variant == "divided at first")

"""Heads of some ranks alone, averaged over these ranks: whose mean they are to follow is left open."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.mark.parametrize(("divisor", "found"), [(2.0, []), (1.0, [("GS303", "2")])])
def test_heads_that_follow_their_own_tokens_are_not_accused(
    tmp_path: Path, divisor: float, found: list[tuple[str, str]]
) -> None:
    warm_up()
    launch("own_head_workers:train", (divisor, str(tmp_path / "run")), 4, timeout_s=100)
    report = diagnose(read_run(tmp_path / "run"))
    assert [(finding.code, finding.factor.exact) for finding in report.findings] == found
    assert any("these ranks' own tokens, and x 2 of their part" in reason for reason in report.reasons)


def test_heads_that_a_line_scales_to_unequal_tokens_of_their_own_are_not_accused(tmp_path: Path) -> None:
    warm_up()
    launch("own_head_workers:train_by_hand", (str(tmp_path / "run"),), 4, timeout_s=100)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("these ranks' own tokens, and x 1." in reason for reason in report.reasons)


@pytest.mark.parametrize(("divisor", "verdict"), [(4.0, "clean"), (0.0, "undetermined")])
def test_experts_over_shared_tokens_are_told_what_divides_them(tmp_path: Path, divisor: float, verdict: str) -> None:
    """Of their own choice FSDP2's reductions divide by the ranks that hold an expert."""
    warm_up()
    launch("own_head_workers:train_experts", (str(tmp_path / "run"), divisor), 4, timeout_s=100)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == (verdict, [])
    assert any("share their tokens" in reason and "x 2 of" in reason for reason in report.reasons) == (divisor == 0)


@pytest.mark.parametrize("at_loss", [False, True])
@pytest.mark.parametrize(("summed", "found"), [(True, []), (False, ["GS802"])])
def test_a_part_of_the_classes_has_the_gradient_of_the_one_loss(
    tmp_path: Path, summed: bool, at_loss: bool, found: list[str]
) -> None:
    """Its tokens would count on each rank: other gradients of the loss are reduced over them."""
    warm_up()
    launch("own_head_workers:train_parts", (str(tmp_path / "run"), summed, at_loss), 2, timeout_s=100)
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == found
    assert any("compute one loss" in reason and "x 2 is right for parts" in reason for reason in report.reasons)

"""Tensor-parallel layers by hand below shards and in pipelines: right ones are clean, each fault is one finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch


def trained(trainer: str, fault: str, tmp_path: Path) -> Report:
    launch("mixed_workers:run", (trainer, fault, str(tmp_path / "run")), 4, timeout_s=100)
    return diagnose(read_run(tmp_path / "run"))


def line_of(fault: str) -> int:
    lines = (Path(__file__).parent / "mixed_workers.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {fault}"))


@pytest.mark.parametrize(
    ("trainer", "how"),
    [
        ("by hand", "clipped"),
        ("fsdp1", ""),
        ("fsdp1", "original"),
        ("fsdp1", "original, vocabulary, told"),
        ("stages", ""),
        ("stages", "early"),
    ],
)
def test_right_ones_are_clean(trainer: str, how: str, tmp_path: Path) -> None:
    """Data ranks that shard a tensor-parallel layer's part shard another tensor than those of the next part."""
    report = trained(trainer, how, tmp_path)
    assert (report.verdict, report.findings, report.reasons) == ("clean", [], [])


def test_sharded_parts_of_one_seed_leave_the_verdict_open(tmp_path: Path) -> None:
    report = trained("fsdp1", "vocabulary", tmp_path)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert report.reasons[0].startswith("the gradients of first.weight differ between ranks")


def test_a_clip_by_copies_that_differ_is_a_consequence(tmp_path: Path) -> None:
    """Each tensor-parallel rank clips by a norm of its own, for its copy of the first layer has its own summand."""
    (finding,) = trained("by hand", "unsummed, clipped", tmp_path).findings
    assert (finding.code, finding.num_parameters, finding.factor.expression) == ("GS703", 1, "1/tp")


def test_a_clip_by_the_norm_of_one_axis_is_local(tmp_path: Path) -> None:
    (finding,) = trained("by hand", "norm of group", tmp_path).findings
    assert finding.code == "GS601" and finding.first_event is not None
    assert finding.first_event.line == line_of("norm of group")
    assert "of rank 0: ranks 0 and 1" in finding.explanation


def test_a_sum_that_all_stages_lack_is_one_finding(tmp_path: Path) -> None:
    (finding,) = trained("stages", "unsummed", tmp_path).findings
    assert finding.code == "GS802"


def test_what_few_labels_show_of_a_factor_between_stages_is_believed_beside_others(tmp_path: Path) -> None:
    (finding,) = trained("stages", "scaled", tmp_path).findings
    assert (finding.code, finding.ranks, finding.steps) == ("GS202", [0, 1], [0, 1])
    assert finding.first_event is not None and finding.first_event.before is not None
    assert finding.first_event.before["line"] == line_of("scaled")

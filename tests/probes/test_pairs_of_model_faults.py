"""Two faults at once of ranks that hold one model: each is told with its own parameters, and none hides the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch


def judged(run_dir: Path, *faults: str, worker: str = "train") -> Report:
    launch(f"model_pair_workers:{worker}", (faults, str(run_dir)), 2, timeout_s=60)
    return diagnose(read_run(run_dir))


def told(report: Report) -> dict[str, list[str]]:
    """By code the parameters that a finding concerns."""
    members = {unit.unit: unit.parameters for unit in report.units}
    return {one.code: sorted(name for unit in one.units for name in members[unit]) for one in report.findings}


def test_without_faults_nothing_is_found(tmp_path: Path) -> None:
    assert judged(tmp_path / "run").verdict == "clean"


def test_parts_that_nobody_sums_are_told_beside_one_of_them_that_a_line_doubles(tmp_path: Path) -> None:
    report = judged(tmp_path / "run", "norms not summed", "norm doubled")
    assert told(report) == {"GS703": ["norm.bias", "norm.weight"], "GS000": ["norm.weight"]}
    doubled = next(one for one in report.findings if one.code == "GS000")
    assert doubled.factor.observed == pytest.approx(2, rel=1e-4)


def test_what_an_earlier_step_left_in_one_gradient_names_no_other(tmp_path: Path) -> None:
    assert told(judged(tmp_path / "run", "late norm")) == {"GS402": ["norm.bias"]}


def test_a_sum_too_many_in_backward_stays_a_reason_beside_another_fault(tmp_path: Path) -> None:
    report = judged(tmp_path / "run", "summed twice in backward", "head doubled")
    assert told(report) == {"GS000": ["head.weight"]}
    assert any("gradients come back through SumTwice" in reason and "x 2" in reason for reason in report.reasons)


@pytest.mark.parametrize("faults", [(), ("expert doubled",), ("expert doubled", "head doubled")])
def test_a_line_that_takes_back_a_division_is_told_and_no_reduction(faults: tuple[str, ...], tmp_path: Path) -> None:
    """Nothing is measured between the two, and what they make together is nothing."""
    report = judged(tmp_path / "run", *faults, worker="train_experts")
    assert [one.code for one in report.findings] == ["GS000"] * len(faults)
    lines = {one.units[0].split(".")[0]: one.first_event for one in report.findings}
    assert sorted(lines) == sorted(fault.split()[0] for fault in faults)
    for name, event in lines.items():
        assert event is not None and event.kind == "grad_write" and event.line is not None
        source = (Path(__file__).parent / "model_pair_workers.py").read_text().splitlines()[event.line - 1]
        assert f"model.{name}.weight.grad.mul_" in source


def test_a_sum_over_one_rank_and_the_division_behind_it_are_no_two_faults_beside_others(tmp_path: Path) -> None:
    report = judged(tmp_path / "run", "losses doubled", "not reduced", worker="train_experts")
    assert sorted(one.code for one in report.findings) == ["GS103", "GS303"]
    assert [one.factor.observed for one in report.findings] == [pytest.approx(2, rel=1e-4)] * 2

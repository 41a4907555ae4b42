"""Shards by hand: what passes reduce is added up beside `.grad`, in parts too small to be solved alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from added_up_workers import HOOKED, VARIANTS
from beside import in_memory, judged_beside

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run


def judged_both_ways(run: Path) -> Report:
    """In memory, and step by step as the command does, which keeps of a step only what the next one asks for."""
    report = in_memory(run)
    assert [finding.code for finding in diagnose_run(run).findings] == [finding.code for finding in report.findings]
    return report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "added_up_workers:train_all", VARIANTS, num_ranks=4, judge=judged_both_ways)


@pytest.mark.parametrize("variant", ["flat", "each"])
def test_small_parts_are_known_by_what_reductions_gave(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert (report.verdict, report.findings) == ("clean", []), report.reasons
    assert report.coverage.parameters_observed == report.coverage.parameters_total


@pytest.mark.parametrize("variant", ["flat, divided", "each, divided"])
def test_a_division_behind_the_reductions_is_found_once(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert (finding.code, finding.num_parameters) == ("GS101", 9)
    assert finding.factor.observed == pytest.approx(1 / 4)
    assert finding.first_event is not None and finding.first_event.kind == "grad_write"


def test_gradients_that_are_reduced_again_with_every_pass_are_one_finding(reports: dict[str, Report]) -> None:
    (finding,) = reports["each, kept"].findings
    assert finding.factor.expression == "(K-k)^1"


def test_what_an_earlier_step_left_is_a_part_of_all_that_reductions_give(reports: dict[str, Report]) -> None:
    report = reports["flat, kept for ever"]
    stale, again = sorted(report.findings, key=lambda finding: finding.code, reverse=True)
    assert (stale.code, stale.steps, stale.num_parameters) == ("GS402", [1], 9)
    assert (again.factor.expression, again.steps, again.num_parameters) == ("(K-k)^1", [0, 1], 9)
    assert not report.reasons


def test_a_buffer_that_is_not_emptied_between_steps_is_found(reports: dict[str, Report]) -> None:
    (finding,) = reports["flat, left"].findings
    assert (finding.code, finding.steps, finding.num_parameters) == ("GS402", [1], 9)
    assert finding.first_event is not None and finding.first_event.kind == "optimizer_step"


def test_a_running_mean_is_named_and_left_open(reports: dict[str, Report]) -> None:
    report = reports["flat, faded"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("x 1 of this step's right gradient and x 0.5 of what" in reason for reason in report.reasons)


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "added_up_workers:train_hooked", HOOKED)


def test_what_hooks_flatten_and_reduce_is_seen_in_front_of_a_clip_by_hand(hooked: dict[str, Report]) -> None:
    report = hooked["clipped"]
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def test_shards_that_each_pass_writes_anew_are_one_finding(hooked: dict[str, Report]) -> None:
    (finding,) = hooked["overwritten"].findings
    assert (finding.code, finding.steps) == ("GS401", [0, 1])

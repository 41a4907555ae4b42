"""Optimizers that step inside of backward before DDP has reduced, and ranks that are not given what one gathers."""

from __future__ import annotations

import pytest
from early_step_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("early")
    launch("early_step_workers:run", (str(folder),), 2, timeout_s=100)
    return {variant: diagnose_run(folder / variant) for variant in VARIANTS}


def test_optimizers_that_step_in_hooks_on_parameters_come_before_the_wrapper_reduces(
    reports: dict[str, Report],
) -> None:
    (finding,) = reports["in hooks on parameters"].findings
    assert finding.code == "GS103"
    assert "the optimizer steps inside of the backward pass" in finding.explanation
    first = finding.first_event
    assert first is not None and first.kind == "optimizer_step"
    assert (first.function or "").endswith("step")


def test_an_optimizer_that_steps_inside_of_backward_behind_the_reducer_is_clean(reports: dict[str, Report]) -> None:
    assert (reports["behind the reducer"].verdict, reports["behind the reducer"].reasons) == ("clean", [])


def test_what_one_rank_gathers_and_sends_back_is_clean(reports: dict[str, Report]) -> None:
    assert reports["gathered and sent back"].verdict == "clean"


def test_ranks_that_are_not_sent_what_one_has_gathered_lack_the_others_contributions(
    reports: dict[str, Report],
) -> None:
    (finding,) = reports["gathered by one rank"].findings
    assert (finding.code, finding.ranks) == ("GS103", [1])
    assert "other ranks' copies of it are given them" in finding.explanation

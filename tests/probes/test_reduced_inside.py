"""Gradients that an optimizer reduces in its own step are followed to what came out there."""

from __future__ import annotations

from pathlib import Path

import pytest
from beside import judged_beside

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trainer.launch import warm_up

EXPECTED = {
    "right": ("clean", []),
    "right at once": ("clean", []),
    "right by future": ("clean", []),
    "right to owners": ("clean", []),
    "right as a list": ("clean", []),
    "right as a stack": ("clean", []),
    "summed": ("undetermined", []),  # the optimizer may divide
    "averaged twice": ("findings", [("GS101", 0.5)]),  # and multiplies by nothing
    "each alone": ("findings", [("GS103", 2.0)]),
    "behind the step": ("findings", [("GS103", 2.0)]),
    "handed on": ("clean", []),
    "summed and handed on": ("findings", [("GS303", 2.0)]),  # what divides behind it would have been seen
    "right in parts": ("undetermined", []),  # others' parts of the gradient are what they were
    "in parts that stay away": ("findings", [("GS103", 0.0)]),
    "not all": ("undetermined", []),  # it may combine something else of that one
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    return judged_beside(tmp_path_factory, "inside_workers:run", EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize("variant", EXPECTED)
def test_what_an_optimizer_reduces_in_its_own_step_is_judged_behind_it(
    reports: dict[str, Report], variant: str
) -> None:
    report = reports[variant]
    found = [(finding.code, round(finding.factor.observed or 0, 4)) for finding in report.findings]
    assert (report.verdict, found) == EXPECTED[variant], report.reasons


@pytest.mark.slow
def test_a_factor_that_the_optimizer_may_divide_by_is_told_with_its_line(reports: dict[str, Report]) -> None:
    assert any(
        "x 2 behind the reduction that Parted runs in its own step (inside_workers.py:" in reason
        for reason in reports["summed"].reasons
    )


@pytest.mark.slow
def test_a_part_that_a_rank_does_not_step_by_alone_is_named(reports: dict[str, Report]) -> None:
    assert any("each rank has its own part" in reason for reason in reports["right in parts"].reasons)


def test_what_is_waited_for_twice_or_by_nobody_is_sampled_once_and_let_go(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist

    from gradcheck_dist.probes import attach
    from gradcheck_dist.probes.reductions.awaited import Awaited

    plain = dist.Work.wait, torch._C.Future.wait
    with attach(tmp_path / "run") as session:
        awaited = Awaited(session.recorder, session._patches)
        sampled: list[str] = []
        future, other = torch.futures.Future(), torch.futures.Future()
        awaited.later(future, lambda: sampled.append("once"))
        awaited.later(other, lambda: sampled.append("never"))
        future.set_result(0)
        for _ in range(2):
            torch._C.Future.wait(future)
        assert sampled == ["once"]
    assert (dist.Work.wait, torch._C.Future.wait) == plain

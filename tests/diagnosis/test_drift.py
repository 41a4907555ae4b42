"""What first shows after copies drifted apart belongs to the fault that let them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.finding import Factor, Finding
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.drift import leave_drift, set_apart
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

RUN = World(Trainer(root=global_mean(), op="sum")).run()


def finding(code: str, step: int) -> Finding:
    return Finding(
        code=code, name="", severity="error", step=step, factor=Factor(observed=None), pattern="", units=[],
        num_parameters=1, ranks=[0, 1], first_event=None, explanation="", fix="", steps=[step],
    )  # fmt: skip


def steps(*codes: list[str]) -> list[StepVerdict]:
    verdict = judge_step(RUN, 0, "global-token-mean", "given")
    return [
        replace(
            verdict,
            context=replace(verdict.context, step=step),
            findings=[finding(code, step) for code in of_step],
            remarks=[],
        )
        for step, of_step in enumerate(codes)
    ]


@pytest.mark.parametrize(
    ("cause", "late"),
    [("GS601", "GS802"), ("GS602", "GS802"), ("GS703", "GS802"), ("GS802", "GS703"), ("GS103", "GS105")],
)
def test_what_shows_only_behind_unequal_updates_is_their_consequence(cause: str, late: str) -> None:
    first, second = steps([cause], [cause, late])
    leave_drift([first, second])
    assert [one.code for one in first.findings + second.findings] == [cause, cause]
    assert any(late in remark and cause in remark for remark in second.remarks)


def test_unequal_gradients_of_copies_that_accuse_nobody_set_apart_too() -> None:
    first, second = steps([], ["GS000"])
    leave_drift([replace(first, apart=frozenset({(-1, "weight")})), second])
    assert second.findings == []
    assert any("unequal gradients of copies in step 0" in remark for remark in second.remarks)


@pytest.mark.parametrize("each", [False, True])
def test_copies_are_set_apart_where_a_rank_reads_another_weight(each: bool) -> None:
    verdict = judge_step(RUN, 0, "global-token-mean", "given")
    assert not verdict.apart
    late = [replace(cell, ratio=cell.ratio * 1.5) for cell in verdict.held[-1].cells]
    held = [replace(one, cells=late) if each or one is verdict.held[-1] else one for one in verdict.held]
    assert bool(set_apart(held)) != each


@pytest.mark.parametrize("earlier", [["GS601", "GS802"], ["GS303"], []])
def test_what_showed_before_or_has_no_such_cause_stays(earlier: list[str]) -> None:
    verdicts = steps(earlier, ["GS802", "GS303"])
    leave_drift(verdicts)
    assert [one.code for one in verdicts[1].findings] == ["GS802", "GS303"]


@pytest.mark.parametrize("each", [False, True])
def test_copies_are_set_apart_where_a_rank_reads_an_earlier_gradient_as_well(each: bool) -> None:
    verdict = judge_step(RUN, 0, "global-token-mean", "given")
    stale: Any = SimpleNamespace(final=lambda rank: SimpleNamespace(leftover=True))
    held = [replace(one, replay=stale) if each or one is verdict.held[-1] else one for one in verdict.held]
    assert bool(set_apart(held)) != each

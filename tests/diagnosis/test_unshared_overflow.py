"""A loss scale that overflowed: skipped by all ranks of a model it is no fault, skipped by some it is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.steps.alternatives import until_apart
from gradcheck_dist.events import AmpUnscale, OptimizerStep, Reduce
from gradcheck_dist.trace.run import Run

SCALED = Trainer(root=global_mean(), op="sum", accumulation=2, data_ranks=2, loss_scale=1024.0)
STAGES = replace(SCALED, impl="none", data_ranks=1, stages=2, microbatches=2)


def overflowed(trainer: Trainer, ranks: set[int], *, apart: bool = False) -> Run:
    """A run in which these ranks found an overflow and did not step. `apart`: no rank reduces with another."""
    run = World(trainer, 3).run()
    for rank, trace in run.ranks.items():
        if apart:
            trace.header = msgspec.structs.replace(trace.header, axes=None)
            trace.events = [event for event in trace.events if not isinstance(event, Reduce)]
        if rank in ranks:
            trace.events = [
                msgspec.structs.replace(event, found_inf=True) if isinstance(event, AmpUnscale) else event
                for event in trace.events
                if not isinstance(event, OptimizerStep)
            ]
    return run


@pytest.mark.parametrize("trainer", [SCALED, STAGES], ids=["replicas", "stages"])
@pytest.mark.parametrize(("ranks", "found"), [(set(), []), ({0}, ["GS607"]), ({1}, ["GS607"]), ({0, 1}, [])], ids=str)
def test_a_step_that_some_ranks_skip_is_found(trainer: Trainer, ranks: set[int], found: list[str]) -> None:
    report = diagnose(overflowed(trainer, ranks))
    told = [finding for finding in report.findings if finding.code == "GS607"]
    assert [finding.code for finding in told] == found
    assert all(finding.first_event is not None and finding.first_event.rank in ranks for finding in told)


def test_a_run_of_which_every_step_was_skipped_says_so() -> None:
    report = diagnose(overflowed(SCALED, {0, 1}))
    assert report.verdict == "undetermined"
    assert report.reasons == [
        "the GradScaler found an overflow in step 0: no optimizer was called, and no gradient was used"
    ]
    assert (report.run.steps, report.run.skipped_steps) == ([], [0])
    assert "--steps" in report.next_step


def test_steps_behind_one_that_only_some_ranks_took_are_its_consequence() -> None:
    codes: tuple[list[str], ...] = (["GS101"], ["GS607"], ["GS303", "GS000"], [], ["GS607"])
    verdicts: list[Any] = [
        SimpleNamespace(context=SimpleNamespace(step=step), findings=[SimpleNamespace(code=code) for code in of_step])
        for step, of_step in enumerate(codes)
    ]
    kept, notes = until_apart(verdicts)
    assert [verdict.context.step for verdict in kept] == [0, 1, 4]
    assert notes[0].startswith("steps 2 and 3 came after step 1, which only some ranks took")
    assert until_apart(verdicts[:2]) == (verdicts[:2], [])


def test_ranks_that_share_nothing_may_skip_alone() -> None:
    report = diagnose(overflowed(SCALED, {1}, apart=True))
    assert "GS607" not in [finding.code for finding in report.findings]

"""Right weights, and whether the records account for them."""

from __future__ import annotations

import pytest
from held_back import hold_back
from random_trainers import global_mean
from simulator import Trainer, World
from trainer_families import make_case

from gradcheck_dist.diagnosis.engine import objective_of
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.unexplained import unexplained
from gradcheck_dist.events import Reduce, ScaleGrads
from gradcheck_dist.trace.run import Run


def said(run: Run) -> list[str]:
    return unexplained(judge_step(run, 0, *objective_of(run, None)))


@pytest.mark.parametrize("seed", range(6))
def test_the_records_of_a_right_trainer_explain_every_weight(seed: int) -> None:
    assert said(World(make_case("healthy-trainers", seed).trainer, seed).run()) == []


def test_so_do_those_of_replicas_that_are_joined_in_the_last_step_only() -> None:
    shape = {"impl": "hsdp", "data_ranks": 4, "replicas": 2, "accumulation": 3, "sync": "every", "replicas_last": True}
    assert said(World(Trainer(root=global_mean(), op="sum", **shape), 1).run()) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_a_reduction_that_was_missed_is_told_of_whatever_the_verdict(seed: int) -> None:
    trainer = make_case("double-averaging", seed).trainer
    assert any("no recorded reduction" in words for words in said(hold_back(World(trainer, seed).run(), Reduce)))


def test_a_scaling_that_was_missed_is_told_of_with_its_factor() -> None:
    trainer = make_case("rescaled-accumulation", 1).trainer
    whole, without = World(trainer, 1).run(), hold_back(World(trainer, 1).run(), ScaleGrads)
    assert said(whole) == []
    assert any("by nothing recorded" in words for words in said(without))

"""Gradients that are reduced over one mesh axis after the other: a contribution reaches its holder over other ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean
from reduced_steps import all_reduce, begun, ended, unrecorded_sum
from simulated_step import _clip, _scale
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report

CP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))
CP_LINE, DP_LINE = 16, 18


def judged(between: float = 1.0, behind: float = 1.0) -> Report:
    """Four ranks, reduced over cp, multiplied by `between`, reduced over dp, multiplied by `behind`."""
    world = begun()
    for groups, line, factor in ((CP, CP_LINE, between), (DP, DP_LINE, behind)):
        all_reduce(world, groups, line)
        for rank in world.ranks:
            if factor != 1:
                _scale(world, rank, factor, list(rank.ids))
    return ended(world)


def test_two_reductions_in_turn_are_right() -> None:
    assert judged().verdict == "clean"


@pytest.mark.parametrize(
    ("factors", "line", "before"),
    [({"between": 0.5}, CP_LINE, "reduce"), ({"behind": 0.5}, DP_LINE, "optimizer_step")],
)
def test_what_happens_between_them_or_behind_them_is_one_finding(
    factors: dict[str, float], line: int, before: str
) -> None:
    (finding,) = judged(**factors).findings
    assert finding.code == "GS000"
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-5)
    assert finding.pattern == "every contribution x 0.5"
    event = finding.first_event
    assert event is not None and event.before is not None
    assert (event.line, event.before["kind"]) == (line, before)


@pytest.mark.parametrize("replicas", [2, 3])
def test_an_average_in_two_parts_is_one_average(replicas: int) -> None:
    """set_requires_all_reduce(False): earlier accumulation steps come to the replicas with the last one."""
    trainer = Trainer(root=global_mean(), op="avg", impl="hsdp", data_ranks=6, replicas=replicas, accumulation=3,
                      sync="every", replicas_last=True)  # fmt: skip
    (finding,) = diagnose(World(trainer, 1).run()).findings
    assert (finding.code, finding.factor.expression) == ("GS101", "1/(dp_replicate * dp_shard)")
    assert diagnose(World(replace(trainer, op="sum"), 1).run()).findings == []


def test_replicas_that_are_never_joined_are_told_with_the_groups_that_were() -> None:
    """set_requires_all_reduce(False), left off: shards are reduced within each replica only."""
    trainer = Trainer(root=global_mean(), op="sum", impl="hsdp", data_ranks=4, replicas=2, accumulation=2,
                      sync="every", replicas_last=True, replicas_kept=True)  # fmt: skip
    world, without_tokens = World(trainer, 1), World(trainer, 1)
    key = (1, 0, 0)
    without_tokens.num_tokens[key] = 0
    for gradients in without_tokens.token_gradients.values():
        gradients[trainer.keys.index(key)] = 0
    for one in (world, without_tokens):
        (finding,) = diagnose(one.run()).findings
        assert finding.code == "GS103"
        assert "reduced over ranks 0,1 | 2,3 only" in finding.explanation
        assert "set_requires_all_reduce(True)" in finding.fix


def test_a_reduction_that_nobody_waits_for_is_told_as_one() -> None:
    world = begun()
    all_reduce(world, ((0, 1, 2, 3),), DP_LINE, read_early=True)
    (finding,) = ended(world).findings
    assert finding.first_event is not None
    assert (finding.code, finding.first_event.kind, finding.first_event.line) == ("GS103", "reduce", DP_LINE)
    assert "the result is not in them" in finding.explanation and "wait()" in finding.fix


def test_a_sum_that_nobody_recorded_behind_one_that_scatters_is_one_cause_with_its_division() -> None:
    """A reduce-scatter within a node, and by messages over nodes: other nodes' contributions are none of the first."""
    world = begun()
    all_reduce(world, CP, CP_LINE, read_by_half=True)
    unrecorded_sum(world, DP, 3.0)
    (finding,) = ended(world).findings
    assert finding.code == "GS000"
    assert finding.factor.observed == pytest.approx(3.0, rel=1e-3)
    assert "every contribution" in finding.pattern
    assert finding.first_event is not None and finding.first_event.line == CP_LINE


def test_a_division_by_the_ranks_behind_an_unrecorded_sum_averages_twice() -> None:
    world = begun(num_ranks=3)
    unrecorded_sum(world, ((0, 1, 2),), 1 / 3)
    _clip(world, max_norm=1e6)
    (finding,) = ended(world).findings
    assert (finding.code, finding.factor.expression) == ("GS101", "1/world_size")


def test_a_division_by_the_ranks_or_by_the_accumulation_steps_is_not_told_apart() -> None:
    world = begun(num_ranks=2)
    unrecorded_sum(world, ((0, 1),), 1 / 2)
    _clip(world, max_norm=1e6)
    (finding,) = ended(world).findings
    assert finding.code == "GS000"
    assert finding.suggested_experiment


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_parameter_that_an_unrecorded_sum_of_replicas_leaves_out_is_one_finding(factor: float) -> None:
    """What a recorded reduction brought from the rank beside it is off as its own contributions are."""
    world = begun(factor=1 / factor)
    all_reduce(world, CP, CP_LINE)
    unrecorded_sum(world, DP, factor, but="norm.weight")
    (finding,) = ended(world).findings
    assert (finding.code, finding.num_parameters) == ("GS103", 1)
    assert finding.factor.observed in (0.0, pytest.approx(1 / factor))

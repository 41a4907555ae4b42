"""Gradients that are reduced over one mesh axis after the other: a contribution reaches its holder over other ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from random_trainers import global_mean
from simulated_step import _backward, _clip, _scale, _sum
from simulator import AFTER, BEFORE, OptimizerStep, Reduce, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import Run

CP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))
CP_LINE, DP_LINE = 16, 18


def all_reduce(world: World, groups: tuple[tuple[int, ...], ...], line: int, *, read_early: bool = False,
               read_by_half: bool = False) -> None:  # fmt: skip
    """A recorded all-reduce by hand of every gradient. `read_early`: asynchronous, and nobody waits for it;
    `read_by_half`: of each parameter one of two ranks has the result, as behind a reduce-scatter of a flat copy."""
    for group in groups:
        members = [world.ranks[rank] for rank in group]
        seqs = {rank.rank: rank.next_seq() for rank in members}
        for rank in members:
            rank.sample_grads(seqs[rank.rank], BEFORE, list(rank.ids))
        for name in members[0].ids if not read_early else ():
            total = _sum(world, [rank.grad[name] for rank in members], 1.0)
            for rank in members:
                rank.grad[name] = total
        for rank in members:
            shown = [name for i, name in enumerate(rank.ids) if not read_by_half or i % 2 == group.index(rank.rank)]
            if not read_early:
                rank.sample_grads(seqs[rank.rank], AFTER, shown)
            rank.emit(Reduce, seq=seqs[rank.rank], line=line, impl="all_reduce", op="sum", group=group,
                      params=rank.everything, accumulation_step=world.trainer.accumulation)  # fmt: skip


def judged(between: float = 1.0, behind: float = 1.0) -> Report:
    """Four ranks, reduced over cp, multiplied by `between`, reduced over dp, multiplied by `behind`."""
    world = begun()
    for groups, line, factor in ((CP, CP_LINE, between), (DP, DP_LINE, behind)):
        all_reduce(world, groups, line)
        for rank in world.ranks:
            if factor != 1:
                _scale(world, rank, factor, list(rank.ids))
    return ended(world)


def unrecorded_sum(world: World, groups: tuple[tuple[int, ...], ...], factor: float = 1.0) -> None:
    """A sum over ranks made of messages that no probe sees, times a factor."""
    for group in groups:
        members = [world.ranks[rank] for rank in group]
        for name in members[0].ids:
            total = _sum(world, [rank.grad[name] for rank in members], factor)
            for rank in members:
                rank.grad[name] = total


def begun(num_ranks: int = 4) -> World:
    """Ranks behind their backward passes."""
    world = World(Trainer(root=global_mean(1), impl="none", data_ranks=num_ranks, accumulation=2), 3)
    for k in range(2):
        _backward(world, k, 0)
    return world


def ended(world: World) -> Report:
    """What is found once the optimizer has stepped."""
    for rank in world.ranks:
        seq = rank.next_seq()
        rank.sample_grads(seq, BEFORE, list(rank.ids))
        rank.emit(OptimizerStep, seq=seq, optimizer="SGD", params=rank.everything)
        rank.flush()
    run = Run(Path("simulated"), {"world_size": len(world.ranks)})
    run.ranks = {rank.rank: rank.trace for rank in world.ranks}
    return diagnose(run)


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
    (finding,) = diagnose(World(trainer, 1).run()).findings
    assert finding.code == "GS103"
    assert "reduced over ranks 0,1 | 2,3 only" in finding.explanation
    assert "set_requires_all_reduce(True)" in finding.fix


def test_a_reduction_that_nobody_waits_for_is_told_as_one() -> None:
    world = begun()
    all_reduce(world, ((0, 1, 2, 3),), DP_LINE, read_early=True)
    (finding,) = ended(world).findings
    assert finding.first_event is not None
    assert (finding.code, finding.first_event.kind, finding.first_event.line) == ("GS000", "reduce", DP_LINE)
    assert "is not in the gradient" in finding.explanation and "work.wait()" in finding.fix


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

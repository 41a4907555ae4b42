"""A communication hook of the trainer's own sums, and does what nobody documents besides."""

from __future__ import annotations

import pytest
from random_trainers import global_mean
from reduced_steps import ended, unrecorded_sum
from simulated_step import _backward
from simulator import AFTER, BEFORE, Reduce, Trainer, World

from gradcheck_dist.diagnosis.finding import Report

RANKS, REDUCE_LINE = 3, 16


def judged(factor: float, *, num_reductions: int = 1, times: int = RANKS) -> Report:
    """Three ranks whose losses are multiplied by their number, or by `times`, and a hook that sums over them and
    multiplies by `factor`, behind the last of two passes or behind both."""
    world = World(Trainer(root=global_mean(times), impl="none", data_ranks=RANKS, accumulation=2), 3)
    for k in range(2):
        _backward(world, k, 0)
        if k < 2 - num_reductions:
            continue
        seqs = [rank.next_seq() for rank in world.ranks]
        for seq, rank in zip(seqs, world.ranks, strict=True):
            rank.sample_grads(seq, BEFORE, list(rank.ids))
        unrecorded_sum(world, (tuple(range(RANKS)),), factor)
        for seq, rank in zip(seqs, world.ranks, strict=True):
            rank.sample_grads(seq, AFTER, list(rank.ids))
            rank.emit(Reduce, seq=seq, line=REDUCE_LINE, impl="ddp", op="sum", group=tuple(range(RANKS)),
                      params=rank.everything, accumulation_step=k, hook="train.hook")  # fmt: skip
    return ended(world)


def test_a_hook_that_averages_is_what_losses_times_the_ranks_ask_for() -> None:
    assert judged(1 / RANKS).verdict == "clean"
    assert judged(1 / RANKS, num_reductions=2).verdict == "clean"


@pytest.mark.parametrize("num_reductions", [1, 2])
def test_losses_that_nobody_divides_by_passes_are_the_fault_and_the_average_is_none(num_reductions: int) -> None:
    (finding,) = judged(1 / RANKS, num_reductions=num_reductions, times=2 * RANKS).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


@pytest.mark.parametrize("num_reductions", [1, 2])
def test_a_hook_that_averages_what_is_divided_by_all_tokens_averages_twice(num_reductions: int) -> None:
    (finding,) = judged(1 / RANKS, num_reductions=num_reductions, times=1).findings
    assert (finding.code, finding.factor.expression) == ("GS101", "1/dp_replicate")
    assert finding.first_event is not None and finding.first_event.line == REDUCE_LINE
    assert "train.hook" in finding.explanation


def test_a_hook_that_divides_twice_is_one_fault_and_the_losses_are_none() -> None:
    (finding,) = judged(1 / RANKS**2).findings
    assert (finding.code, finding.factor.expression) == ("GS000", "1/dp_replicate")
    assert finding.first_event is not None and finding.first_event.line == REDUCE_LINE
    assert finding.first_event.nominal_factor == pytest.approx(1 / RANKS)


def test_a_hook_that_divides_twice_behind_every_pass_is_one_fault() -> None:
    (finding,) = judged(1 / RANKS**2, num_reductions=2).findings
    assert finding.code == "GS000"
    assert "accumulation step" in finding.pattern


def test_losses_times_the_ranks_behind_a_hook_that_only_sums_are_the_fault() -> None:
    (finding,) = judged(1.0).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "dp_replicate")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_wrapper_whose_hooks_are_gone_reduces_nothing(accumulation: int) -> None:
    """The model was moved once it was wrapped (pytorch/pytorch#104336): the reducer is armed, and nobody calls it."""
    world = World(Trainer(root=global_mean(RANKS), impl="none", data_ranks=RANKS, accumulation=accumulation), 3)
    for k in range(accumulation):
        _backward(world, k, 0)
    for rank in world.ranks:
        seq = rank.next_seq()
        rank.sample_grads(seq, BEFORE, list(rank.ids))
        rank.sample_grads(seq, AFTER, list(rank.ids))
        rank.emit(Reduce, seq=seq, line=REDUCE_LINE, impl="ddp", op="avg", group=tuple(range(RANKS)),
                  params=rank.everything, accumulation_step=accumulation - 1)  # fmt: skip
    (finding,) = ended(world).findings
    assert (finding.code, finding.pattern) == ("GS103", "other ranks' contributions x 0, own rank's x 3")
    assert finding.first_event is not None and finding.first_event.line == REDUCE_LINE
    assert "wrapped" in finding.fix


def judged_over_nodes(factor: float) -> Report:
    """Two nodes of two ranks, over both of which a hook sums, one after the other, and multiplies by `factor`."""
    world = World(Trainer(root=global_mean(4), impl="none", data_ranks=4), 3)
    _backward(world, 0, 0)
    seqs = [rank.next_seq() for rank in world.ranks]
    for seq, rank in zip(seqs, world.ranks, strict=True):
        rank.sample_grads(seq, BEFORE, list(rank.ids))
    unrecorded_sum(world, ((0, 1, 2, 3),), factor)
    for place, (seq, rank) in enumerate(zip(seqs, world.ranks, strict=True)):
        rank.sample_grads(seq, AFTER, list(rank.ids))
        node = place // 2 * 2
        rank.emit(Reduce, seq=seq, line=REDUCE_LINE, impl="ddp", op="sum", group=(node, node + 1), replicate_op="sum",
                  replicate_group=(place % 2, place % 2 + 2), params=rank.everything, accumulation_step=0,
                  hook="train.hook")  # fmt: skip
    return ended(world)


def test_a_hook_that_sums_within_nodes_and_between_them_is_judged_as_one_reduction() -> None:
    report = judged_over_nodes(1 / 4)
    assert (report.verdict, report.run.axes["dp_replicate"]) == ("clean", 4)
    (finding,) = judged_over_nodes(1 / 8).findings
    assert finding.first_event is not None and finding.first_event.line == REDUCE_LINE
    assert (finding.first_event.nominal_factor, finding.first_event.observed_factor) == pytest.approx((1 / 4, 1 / 8))
    assert "hook train.hook" in finding.fix


def judged_thrown_away(factor: float, num_kept: int = 0) -> Report:
    """Three ranks whose losses are multiplied by `factor`, and a hook that sums a copy and returns the bucket as it was
    given, but for the first parameters, of which it returns the sum."""
    world = World(Trainer(root=global_mean(factor), impl="none", data_ranks=RANKS, accumulation=2), 3)
    for k in range(2):
        _backward(world, k, 0)
    seqs = [rank.next_seq() for rank in world.ranks]
    for seq, rank in zip(seqs, world.ranks, strict=True):
        rank.sample_grads(seq, BEFORE, list(rank.ids))
    given = [dict(rank.grad) for rank in world.ranks]
    unrecorded_sum(world, (tuple(range(RANKS)),))
    for seq, rank, own in zip(seqs, world.ranks, given, strict=True):
        rank.grad |= {name: own[name] for name in list(own)[num_kept:]}
        rank.sample_grads(seq, AFTER, list(rank.ids))
        rank.emit(Reduce, seq=seq, line=REDUCE_LINE, impl="ddp", op="sum", group=tuple(range(RANKS)),
                  params=rank.everything, accumulation_step=1, hook="train.hook")  # fmt: skip
    return ended(world)


@pytest.mark.parametrize("factor", [1, RANKS])
def test_a_hook_whose_reduction_is_thrown_away_is_one_fault_whatever_it_was_to_divide_by(factor: int) -> None:
    (finding,) = judged_thrown_away(factor).findings
    assert (finding.code, finding.pattern) == ("GS103", f"other ranks' contributions x 0, own rank's x {factor}")
    assert finding.first_event is not None and finding.first_event.line == REDUCE_LINE
    assert "hook train.hook" in finding.explanation
    (finding,) = judged_thrown_away(1, num_kept=2).findings
    assert (finding.code, finding.num_parameters) == ("GS103", 1)


def test_losses_are_told_beside_a_hook_whose_reduction_is_thrown_away() -> None:
    found = {finding.code: finding.factor.expression for finding in judged_thrown_away(RANKS / 2).findings}
    assert found == {"GS303": "1/accumulation_steps", "GS103": "dp_replicate"}


def test_a_hook_that_returns_what_it_summed_is_clean() -> None:
    assert judged_thrown_away(1, num_kept=3).verdict == "clean"

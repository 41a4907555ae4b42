"""What a finding tells its reader to do is what mends this trainer, in the terms of who reduces in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import Key, global_mean, rank_mean
from reduced_steps import all_reduce, ended
from simulated_step import _backward, _scale
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.events import GradWrite

BY_HAND = Trainer(root=global_mean(), impl="all_reduce", op="sum", accumulation=3, data_ranks=2)
LINE = 14
"""Where backward runs in the simulated train.py, and reductions with it."""


def found(trainer: Trainer) -> Finding:
    (finding,) = diagnose(World(trainer, 5).run()).findings
    return finding


def written(world: World, divisors: list[int]) -> Finding:
    """The finding on sums of losses of two passes that a line divides on each rank, and that are summed by hand."""
    for k in range(2):
        _backward(world, k, 0)
    for rank, divisor in zip(world.ranks, divisors, strict=True):
        _scale(world, rank, 1 / divisor, list(rank.ids))
        rank.emit(GradWrite, line=LINE + 1, params=rank.everything, factor=1 / divisor)
    all_reduce(world, ((0, 1),), LINE + 2)
    (finding,) = ended(world).findings
    assert finding.first_event is not None and finding.first_event.line == LINE + 1
    return finding


def sums() -> World:
    return World(Trainer(root=lambda key, tokens: 1.0, impl="none", data_ranks=2, accumulation=2), 7)


def test_a_line_that_counts_more_than_enters_the_losses_is_told_what_to_divide_by() -> None:
    tokens = sum((world := sums()).num_tokens.values())
    finding = written(world, [tokens + 7] * 2)
    assert f"{1 / tokens:.6g} = 1/num_tokens" in finding.fix
    assert f"Look what was counted as {tokens + 7}" in finding.fix


def test_a_line_that_divides_by_own_tokens_is_told_to_count_all() -> None:
    world = sums()
    own = [sum(count for key, count in world.num_tokens.items() if key[0] == rank) for rank in range(2)]
    finding = written(world, [2 * count for count in own])
    assert finding.fix.startswith("Let it divide by the tokens of all ranks (dist.all_reduce their number first)")


def test_what_a_reduction_by_hand_leaves_out_is_told_at_its_line() -> None:
    finding = found(replace(BY_HAND, not_reduced=frozenset({"norm.weight"})))
    assert finding.code == "GS103"
    assert finding.first_event is not None
    assert (finding.first_event.kind, finding.first_event.line) == ("reduce", LINE)
    assert finding.first_event.observed_factor is None  # it does to the others what it should
    assert finding.fix == f"Reduce these parameters' gradients too, as train.py:{LINE} does with the others."


def test_where_nobody_reduces_nobody_is_told_of_no_sync() -> None:
    finding = found(replace(BY_HAND, sync="never"))
    assert (finding.code, "no_sync" in finding.fix) == ("GS103", False)
    assert "after the last backward (dist.all_reduce" in finding.fix
    assert "train through DDP or FSDP" in finding.fix


def test_what_a_wrapper_does_not_reduce_is_told_of_no_sync() -> None:
    assert "leave no_sync()" in found(replace(BY_HAND, impl="ddp", sync="never")).fix


def test_a_reduction_by_hand_that_passes_follow_is_to_come_last() -> None:
    finding = found(replace(BY_HAND, accumulation=2, sync="inverted"))
    assert finding.code == "GS103"
    assert "once, after the last backward" in finding.fix
    assert f"train.py:{LINE} runs before it" in finding.fix


@pytest.mark.parametrize(
    ("impl", "how"),
    [
        ("ddp", "under no_sync()"),
        ("all_reduce", "after the loop over the passes, or, in a hook, in the last pass only"),
    ],
)
def test_a_reduction_in_each_pass_is_stopped_by_the_means_of_who_reduces(impl: str, how: str) -> None:
    finding = found(replace(BY_HAND, impl=impl, sync="every"))
    assert (finding.code, how in finding.fix) == ("GS102", True), finding.fix


@pytest.mark.parametrize(
    ("factor", "accumulation", "fix"),
    [
        (2.0, 2, "Divide each loss by accumulation_steps (or by dp_replicate, which is equal here) as well"),
        (2.0, 3, "Divide each loss by dp_replicate as well"),
    ],
)
def test_a_factor_of_the_loss_is_taken_out_by_its_name(factor: float, accumulation: int, fix: str) -> None:
    averaging = Trainer(root=global_mean(2 * factor), op="avg", accumulation=accumulation, data_ranks=2)
    finding = found(averaging)
    assert (finding.code, finding.fix[: len(fix)]) == ("GS303", fix)


def test_a_division_of_the_loss_too_many_is_taken_out_by_its_name() -> None:
    finding = found(replace(BY_HAND, root=global_mean(1 / 2)))
    assert (finding.code, finding.factor.expression) == ("GS303", "1/world_size")
    assert finding.fix.startswith("Take out a division of the losses by world_size:")


def test_losses_of_one_rank_are_looked_for_up_to_their_backward_pass() -> None:
    def louder(key: Key, tokens: dict[Key, int]) -> float:
        return (3.0 if key[0] == 1 else 1.0) / sum(tokens.values())

    finding = found(replace(BY_HAND, root=louder))
    assert finding.code == "GS000"
    assert f"between this line and their backward pass (train.py:{LINE})" in finding.fix


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_own_tokens_are_replaced_by_those_of_all_ranks_whatever_follows(op: str) -> None:
    """c = R/N behind a sum would be R times too much."""
    finding = found(replace(BY_HAND, op=op, root=rank_mean(2)))
    assert finding.code == "GS302"
    assert "(times the number of ranks where the reduction averages)" in finding.fix


@pytest.mark.parametrize(
    ("factor", "fix"),
    [
        (3.0, "Divide the term by accumulation_steps as well"),
        (1 / 3, "Take out a division of the term by accumulation_steps"),
        (1.37, "Scale the term by the constants of the main loss"),
    ],
)
def test_a_term_is_mended_by_the_name_of_its_factor(factor: float, fix: str) -> None:
    finding = found(replace(BY_HAND, auxiliary=global_mean(0.01 * factor)))
    assert (finding.code, finding.fix[: len(fix)]) == ("GS304", fix)

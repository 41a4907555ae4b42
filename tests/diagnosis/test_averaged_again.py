"""Gradients that a line sums over ranks and divides in every pass: that average is taken again, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean
from reduced_steps import all_reduce, begun, ended
from simulated_step import _backward
from simulator import Buffer, Hand, Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report

RANKS, PASSES = 2, 3


def times(factor: float) -> Trainer:
    """Losses that ask for an average, times a factor."""
    right = global_mean(RANKS)

    def root(key: Key, tokens: dict[Key, int]) -> float:
        return right(key, tokens) * factor

    every_pass = Hand("after_backward", 1 / RANKS)
    return Trainer(root, data_ranks=RANKS, op="sum", sync="every", accumulation=PASSES, hands=(every_pass,))


def judged(trainer: Trainer) -> Report:
    return diagnose(World(trainer, 1).run())


def test_it_is_right() -> None:
    assert judged(times(1.0)).verdict == "clean"


@pytest.mark.parametrize("factor", [PASSES, 1 / PASSES, 1 / RANKS, 1.5])
def test_what_is_wrong_besides_is_one_finding(factor: float) -> None:
    (finding,) = judged(times(factor)).findings
    assert finding.code in ("GS000", "GS303")  # the division, which nobody recorded, may have the wrong number as well
    assert finding.factor.observed == pytest.approx(factor, rel=1e-4)


def test_a_sum_by_another_line_behind_an_average_is_summed_again() -> None:
    world = begun(RANKS, factor=RANKS)
    everyone = (tuple(range(RANKS)),)
    all_reduce(world, everyone, 40)
    for rank in world.ranks:
        rank.grad = {name: Buffer(one.values / RANKS, one.weights / RANKS) for name, one in rank.grad.items()}
    all_reduce(world, everyone, 50)
    (finding,) = ended(world).findings
    assert (finding.code, finding.factor.observed) == ("GS102", pytest.approx(RANKS))
    assert finding.first_event is not None and finding.first_event.line == 50


@pytest.mark.parametrize("divided", [True, False])
def test_an_average_by_the_same_line_is_right_and_a_sum_is_summed_again(divided: bool) -> None:
    """A helper that sums and divides, called twice with no pass in between (horovod #1099)."""
    world = begun(RANKS, factor=RANKS)
    everyone = (tuple(range(RANKS)),)
    for again in range(2):
        all_reduce(world, everyone, 40)
        for rank in world.ranks if divided or not again else ():
            rank.grad = {name: Buffer(one.values / RANKS, one.weights / RANKS) for name, one in rank.grad.items()}
    report = ended(world)
    assert [(one.code, one.factor.observed) for one in report.findings] == (
        [] if divided else [("GS102", pytest.approx(RANKS))]
    )


def test_sums_that_are_divided_at_the_end_alone_are_summed_again() -> None:
    trainer = replace(times(1.0), hands=(Hand("after_backward", 1 / RANKS, steps=frozenset({PASSES - 1})),))
    assert [finding.code for finding in judged(trainer).findings] == ["GS102"]


def two_levels(factor: float, again: int | None = None, divisor: float = 4) -> Report:
    """Two sums over pairs of four ranks in every pass, divided once behind both; one of them `again` in a pass."""
    pairs, across = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    world = World(Trainer(root=global_mean(4 * factor), impl="none", data_ranks=4, accumulation=PASSES), 3)
    for k in range(PASSES):
        _backward(world, k, 0)
        all_reduce(world, pairs, 40)
        all_reduce(world, across, 50)
        if k == again:
            all_reduce(world, across, 60)
        for rank in world.ranks:
            rank.grad = {name: Buffer(one.values / divisor, one.weights / divisor) for name, one in rank.grad.items()}
    return ended(world)


def test_sums_over_two_groups_are_one_average_with_the_division_behind_both() -> None:
    assert two_levels(1.0).verdict == "clean"


@pytest.mark.parametrize("factor", [PASSES, 1 / PASSES, 1.5])
def test_what_is_wrong_beside_two_sums_is_one_finding(factor: float) -> None:
    (finding,) = two_levels(factor).findings
    assert finding.code in ("GS000", "GS303")
    assert finding.factor.observed == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize("again", range(PASSES))
def test_a_third_sum_in_one_pass_is_told(again: int) -> None:
    findings = two_levels(1.0, again).findings
    assert [(finding.code, finding.first_event.line) for finding in findings if finding.first_event] == [("GS102", 60)]


def test_a_second_division_in_every_pass_accuses_no_sum() -> None:
    (finding,) = two_levels(1.0, divisor=16).findings
    assert finding.code == "GS000"
    assert finding.first_event is not None and finding.first_event.line == 50  # between the last sum and the next pass

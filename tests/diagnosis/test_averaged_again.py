"""Gradients that a line sums over ranks and divides in every pass: that average is taken again, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean
from reduced_steps import all_reduce, begun, ended
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


def test_sums_that_are_divided_at_the_end_alone_are_summed_again() -> None:
    trainer = replace(times(1.0), hands=(Hand("after_backward", 1 / RANKS, steps=frozenset({PASSES - 1})),))
    assert [finding.code for finding in judged(trainer).findings] == ["GS102"]

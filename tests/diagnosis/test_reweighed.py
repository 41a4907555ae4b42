"""Means of passes whose gradients a line of the trainer's multiplies by their tokens, and by another number besides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator import Hand, Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose

RANKS = 2


def own_mean(key: Key, tokens: dict[Key, int]) -> float:
    return 1 / tokens[key]


def by_tokens(key: Key, tokens: dict[Key, int]) -> float:
    return RANKS * tokens[key] / sum(tokens.values())


REWEIGHED = Trainer(
    root=own_mean, op="avg", data_ranks=RANKS, accumulation=3, hands=(Hand("leaf", of_key=by_tokens),), reduction="mean"
)


def test_means_that_are_weighed_by_their_tokens_are_right() -> None:
    assert diagnose(World(REWEIGHED, 5).run()).verdict == "clean"


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_another_number_on_that_line_is_no_fault_of_the_losses(factor: float) -> None:
    report = diagnose(World(replace(REWEIGHED, hands=(Hand("leaf", factor, of_key=by_tokens),)), 5).run())
    (finding,) = report.findings
    assert finding.code != "GS301"
    assert finding.factor.observed == pytest.approx(factor, rel=1e-4)


def test_a_change_behind_that_line_is_told_at_its_own_place() -> None:
    hands = (*REWEIGHED.hands, Hand("before_optimizer", 0.7))
    (finding,) = diagnose(World(replace(REWEIGHED, hands=hands), 5).run()).findings
    assert finding.factor.observed == pytest.approx(0.7, rel=1e-4)
    assert finding.first_event is not None and finding.first_event.kind != "loss"


def test_without_that_line_they_are_a_mean_of_means() -> None:
    (finding,) = diagnose(
        World(replace(REWEIGHED, root=lambda key, tokens: 1 / 3 / tokens[key], hands=()), 5).run()
    ).findings
    assert finding.code == "GS301"

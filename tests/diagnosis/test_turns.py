"""Optimizers that step in turn are recorded once each by default, which hides what nobody empties between steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import conclude
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.turns import Turn

TRAINER = Trainer(root=global_mean(), op="sum")
WORLD, ACTOR, CRITIC = frozenset({0, 1}), frozenset({2}), frozenset({3, 4})


def concluded(read: list[frozenset[int]], emptied: frozenset[int], first: int = 0) -> Report:
    """The report of steps whose optimizers read these parameters, of which some were seen to be emptied."""
    verdicts = []
    for step, params in enumerate(read, first):
        verdict = judge_step(World(TRAINER, seed=step).run(), 0, "global-token-mean", "given")
        verdicts.append(replace(verdict, context=replace(verdict.context, step=step), turn=Turn(params, emptied)))
    return conclude(World(TRAINER).run(), verdicts, [], "global-token-mean", "given")


@pytest.mark.parametrize(
    ("read", "emptied", "first", "told"),
    [
        ([WORLD, ACTOR, CRITIC], frozenset(), 0, "3 optimizers step in turn, 3 of them once in these steps"),
        ([WORLD, ACTOR, WORLD], WORLD, 0, "2 optimizers step in turn, 1 of them once in these steps"),
        ([WORLD, ACTOR, CRITIC], WORLD | ACTOR | CRITIC, 0, None),  # somebody empties all of them
        ([WORLD, ACTOR, WORLD, ACTOR], frozenset(), 0, None),  # each has stepped again
        ([WORLD, WORLD, WORLD], frozenset(), 0, None),  # one optimizer, whose later steps show it
        ([WORLD, ACTOR, CRITIC], frozenset(), 5, None),  # these steps were asked for
    ],
)
def test_a_note_says_which_optimizers_stepped_too_rarely_to_show_what_nobody_empties(
    read: list[frozenset[int]], emptied: frozenset[int], first: int, told: str | None
) -> None:
    report = concluded(read, emptied, first)
    notes = [note for note in report.coverage.notes if "step in turn" in note]
    assert report.verdict == "clean" and [told is not None and told in note for note in notes] == [True] * bool(told)
    assert ("--steps 0:6" in (report.next_step or "")) is bool(told)

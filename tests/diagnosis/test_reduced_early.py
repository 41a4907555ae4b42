"""A reduction that comes before its pass is over leaves what is added behind it on its own rank."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_dist.diagnosis.steps.reduced_early import COMES_AGAIN, COMES_EARLY, early_in_words, reduced_early
from gradcheck_dist.events import AFTER, BEFORE, Param, Reduce
from gradcheck_dist.ledger.tracks import Point, StepData, Track, Values

FIRST, REST, OTHERS, EARLIER = np.random.default_rng(0).normal(size=(4, 8))


@pytest.mark.parametrize("earlier", [None, EARLIER])
@pytest.mark.parametrize(
    ("before", "added", "found"),
    [
        (FIRST, REST, True),
        (FIRST + REST, 0 * REST, False),  # as it should be
        (FIRST + REST, REST, False),  # something else was added
        (FIRST, 2 * REST, False),
    ],
)
def test_what_was_lacking_before_a_reduction_and_came_behind_it_tells(
    before: np.ndarray, added: np.ndarray, found: bool, earlier: np.ndarray | None
) -> None:
    start = np.zeros(8) if earlier is None else earlier
    reduced = start + before + OTHERS
    points = [] if earlier is None else [(3, BEFORE, earlier)]
    points += [(7, BEFORE, start + before), (7, AFTER, reduced), (9, BEFORE, reduced + added)]
    event = Reduce(impl="all_reduce", op="sum", group=(0, 1), params=0, seq=7, t_ns=0, step=0)
    track = Track(
        Param(id=0, name="w", shape=(8,), dtype="float32", num_positions=8),
        0,
        leaves={(0, 0): (5, Values(FIRST + REST))},
        points=[Point(seq, role, Values(values)) for seq, role, values in points],
    )
    data = StepData(0, {0: [event]}, {}, {(-1, "w"): {0: track}}, complete=True)
    assert (reduced_early(data, track) is not None) == found


@pytest.mark.parametrize("again", [False, True])
def test_whether_it_comes_once_more_behind_the_rest_is_told(again: bool) -> None:
    first, second = (
        Reduce(impl="all_reduce", op="sum", group=(0, 1), params=0, seq=seq, t_ns=0, step=0) for seq in (7, 9)
    )
    track = Track(Param(id=0, name="w", shape=(8,), dtype="float32", num_positions=8), 0)
    events = [first, second] if again else [first]
    data = StepData(0, {0: events}, {0: {0: (0,)}}, {(-1, "w"): {0: track}}, complete=True)
    assert early_in_words(data, track, first) == (COMES_AGAIN if again else COMES_EARLY)

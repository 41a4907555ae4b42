"""What optimizers made of parameters whose gradients nobody reduced, by their values before and behind a step."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_dist.events import BEFORE, Event, Param, ParamUpdate
from gradcheck_dist.ledger.param_updates import Update, is_averaged, moved_alike, updates_by_param, updates_of
from gradcheck_dist.ledger.tracks import Point, StepData, Track, Values

KEY = (-1, "weight")
BEGUN = np.linspace(-1, 1, 16)
UNLIKE = np.random.default_rng(0).normal(size=(2, 64))
LIKE = np.abs(UNLIKE)


def step(reads: np.ndarray, begun: list[np.ndarray], left: list[np.ndarray]) -> StepData:
    """Two ranks, each with what its optimizer read, and its values before and behind the step."""
    tracks: dict[int, Track] = {}
    events: dict[int, list[Event]] = {}
    for rank in range(2):
        param = Param(id=0, name="weight", shape=(64,), dtype="float32", num_positions=reads.shape[1])
        tracks[rank] = Track(param, rank, points=[Point(5, BEFORE, Values(reads[rank]))])
        values = np.concatenate([begun[rank], left[rank]]).astype("<f4").tobytes()
        events[rank] = [ParamUpdate(seq=6, t_ns=0, step=0, params=(0,), counts=(len(begun[rank]),), values=values)]
    return StepData(0, events, {}, {KEY: tracks}, True)


@pytest.mark.parametrize(
    ("reads", "moved", "begun", "expected"),
    [
        (UNLIKE, (0.1, 0.1), BEGUN, True),
        (UNLIKE, (0.1, 0.2), BEGUN, False),
        (UNLIKE, (0.0, 0.0), BEGUN, False),  # a learning rate of zero
        (LIKE, (0.1, 0.1), BEGUN, False),  # the sign alone may have moved them
        (UNLIKE[:, :1], (0.1, 0.1), BEGUN[:1], False),  # of one element chance makes the signs alike
    ],
)
def test_unlike_gradients_that_move_copies_alike_are_no_chance(
    reads: np.ndarray, moved: tuple[float, float], begun: np.ndarray, expected: bool
) -> None:
    data = step(reads, [begun, begun], [begun + by for by in moved])
    assert moved_alike(data, [KEY]) == expected


def test_shards_of_unequal_sizes_are_no_copies() -> None:
    """Two of five columns, and three (tensor parallelism)."""
    data = step(UNLIKE, [BEGUN[:3], BEGUN[:2]], [BEGUN[:3], BEGUN[:2]])
    assert updates_by_param(data) == {}
    assert not moved_alike(data, [KEY])


def test_steps_of_several_optimizers_are_one_where_they_move_as_many_values() -> None:
    def event(seq: int, values: list[float]) -> ParamUpdate:
        held = np.array(values, "<f4").tobytes()
        return ParamUpdate(seq=seq, t_ns=0, step=0, params=(0,), counts=(len(values) // 2,), values=held)

    (one,) = updates_of([event(1, [1, 2]), event(2, [3, 4])]).values()
    assert (one.begun.tolist(), one.left.tolist()) == ([1], [4])
    (one,) = updates_of([event(1, [1, 2]), event(2, [3, 3, 4, 4])]).values()
    assert (one.begun.tolist(), one.left.tolist()) == ([3, 3], [4, 4])
    assert updates_of([event(1, [])]).keys() == set()


def updates(*ends: tuple[float, float]) -> dict[int, Update]:
    """What each rank's step began with, and left."""
    return {rank: Update(np.full(4, begun), np.full(4, left)) for rank, (begun, left) in enumerate(ends)}


@pytest.mark.parametrize(
    ("of_steps", "expected"),
    [
        ([updates((0, 1), (0, 3)), updates((2, 3), (2, 5))], True),
        ([updates((0, 1), (0, 3)), updates((1, 3), (3, 5)), updates((4, 4), (4, 4))], True),  # every other step
        ([updates((0, 1), (0, 3)), updates((1, 3), (3, 5))], False),  # nobody does
        ([updates((0, 1), (0, 3)), updates((3, 4), (3, 5))], False),  # one rank's is sent
        ([updates((0, 1), (0, 1)), updates((1, 2), (1, 2))], False),
        ([updates((0, 1), (0, 3))], False),
        ([updates((0, 1), (0, 3)), {rank: Update(np.zeros(2), np.zeros(2)) for rank in range(2)}], False),
    ],
)
def test_parameters_that_are_alike_again_when_a_step_begins_are_averaged(
    of_steps: list[dict[int, Update]], expected: bool
) -> None:
    assert is_averaged(of_steps) == expected

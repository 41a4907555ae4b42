"""Gradients that are combined or applied where nobody follows them accuse nobody."""

from __future__ import annotations

from types import SimpleNamespace as N
from typing import Any

import numpy as np
import pytest

from gradcheck_dist.diagnosis.open_cases.inside_step import reduced_inside, stepped_together
from gradcheck_dist.diagnosis.steps.unfollowed import from_before, not_attached
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import BEFORE, Event, OptimizerStep, Param, Reduce, Replica, StepEnd
from gradcheck_dist.ledger.tracks import Point, StepData, Track, Values

NOW: dict[str, Any] = {"t_ns": 0, "step": 0}


def held(nominal: list[float], observed: list[float]) -> Held:
    replay: Any = None
    return Held((-1, "w"), 0, replay, np.array(observed), np.full(len(observed), 1e-9), np.array(nominal))


def test_gradients_that_are_applied_a_step_late_are_no_fault() -> None:
    assert "a step late" in str(from_before([held([0, 0, 1, 1], [0.5, 0.5, 0, 1e-12])]))


@pytest.mark.parametrize(
    ("nominal", "observed"),
    [
        ([0.5, 0.5], [0.5, 0.5]),
        ([0, 0, 1, 1], [0.5, 0.5, 1, 1]),  # kept while the buffer was empty, and added to what came
        ([0, 0, 1, 1], [0, 0, 1, 1]),  # emptied in the wrong place
        ([1, 1], [0, 0]),
    ],
)
def test_what_came_last_is_judged(nominal: list[float], observed: list[float]) -> None:
    assert from_before([held(nominal, observed)]) is None


def step(
    seqs: tuple[int, int], fingerprints: tuple[int, int, int, int] = (1, 1, 2, 3), reduces: bool = True
) -> StepData:
    """Two ranks; `seqs`: when the reduction and the optimizer step come; `fingerprints`: before on rank 0, 1, after."""
    events: dict[int, list[Event]] = {}
    for rank in range(2):
        of_rank: list[Event] = [
            Replica(seq=0, fingerprint=fingerprints[rank], **NOW),
            OptimizerStep(seq=seqs[1], optimizer="Muon", params=0, **NOW),
            StepEnd(seq=8, duration_s=1.0, probe_s=0.0, **NOW),
            Replica(seq=9, fingerprint=fingerprints[2 + rank], after=True, **NOW),
        ]
        if reduces:
            of_rank.append(Reduce(seq=seqs[0], impl="all_reduce", op="sum", group=(0, 1), params=0, **NOW))
        events[rank] = sorted(of_rank, key=lambda event: event.seq)
    return StepData(0, events, {0: {0: (3,)}, 1: {0: (3,)}}, {}, True)


def test_an_optimizer_may_reduce_gradients_itself() -> None:
    assert "when the optimizer has begun its step" in str(stepped_together(step((5, 4))))


@pytest.mark.parametrize(
    ("factor", "others", "seqs", "is_open"),
    [
        (32.0, 0.0, (5, 4), True),  # sums of tokens, of which the optimizer takes the mean over ranks, and its own norm
        (0.5, 0.0, (5, 4), False),  # nothing multiplies
        (32.0, 32.0, (5, 4), False),  # reduced before
        (32.0, 0.0, (4, 5), False),
    ],
)
def test_what_is_too_large_where_an_optimizer_reduces_may_be_divided_there(
    factor: float, others: float, seqs: tuple[int, int], is_open: bool
) -> None:
    cells = [N(key=(0, 0, 0), ratio=factor, margin=1e-6), N(key=(1, 0, 0), ratio=others, margin=1e-6)]
    case: Any = N(
        culprit=N(absent=False),
        pattern=N(kind="uniform", factor=factor),
        terms=(),
        context=N(contributions=N(coordinate={0: 0, 1: 1})),
        held=[N(param=(-1, "weight"), rank=0, cells=cells, replay=N(inside={}))],
    )
    assert ("own passes weigh x 32" in str(reduced_inside(case, step(seqs)))) == is_open


def test_a_reduction_before_or_behind_the_step_is_not_inside_of_it() -> None:
    assert stepped_together(step((4, 5))) is None
    assert stepped_together(step((10, 4))) is None


def test_an_optimizer_that_moves_unlike_gradients_alike_combines_something_itself() -> None:
    assert "moves the parameters alike" in str(stepped_together(step((0, 4), (1, 1, 2, 2), reduces=False)))
    assert stepped_together(step((0, 4), (1, 1, 2, 3), reduces=False)) is None
    assert stepped_together(step((0, 4), (1, 1, 1, 1), reduces=False)) is None  # a learning rate of zero


@pytest.mark.parametrize(("owned", "is_open"), [((3, 4), False), ((3, 3), True)])
def test_owners_that_send_the_others_what_they_stepped_combine_nothing(owned: tuple[int, int], is_open: bool) -> None:
    """As ZeroRedundancyOptimizer, each rank of which steps parameters of its own; not as a mean of what all stepped."""
    data = step((0, 4), (1, 1, 2, 2), reduces=False)
    for rank, of_rank in data.events.items():
        of_rank.insert(2, OptimizerStep(seq=5, optimizer="SGD", params=rank, inside=4, **NOW))
    tracks: Any = {(-1, str(param)): {rank: N(param=N(id=param)) for rank in range(2)} for param in {*owned}}
    sets = {rank: {0: (3, 4), rank: (owned[rank],)} for rank in range(2)}
    found = stepped_together(StepData(0, data.events, sets, tracks, True))
    assert ("moves the parameters alike" in str(found)) == is_open


def test_of_several_optimizers_the_last_shows_what_they_moved() -> None:
    data = step((0, 4), (1, 1, 3, 3), reduces=False)
    for rank, of_rank in data.events.items():
        of_rank.insert(-2, Replica(seq=6, fingerprint=5 + rank, after=True, **NOW))
    assert "moves the parameters alike" in str(stepped_together(data))


def parts(*, missing: int | None = 1, reduced: tuple[int, ...] = (0,), root: int | None = None) -> StepData:
    """Two ranks list two parameters, the second of which has a gradient on rank 0 alone; `reduced`: where it is."""
    events: dict[int, list[Event]] = {}
    sets = {rank: {0: (0, 1), 1: (1,)} for rank in range(2)}
    tracks: dict[tuple[int, str], dict[int, Track]] = {(-1, "a"): {}, (-1, "b"): {}}
    for rank in range(2):
        read = [Point(5, BEFORE, Values(np.ones(3)))]
        for index, key in enumerate(tracks):
            param = Param(id=index, name=key[1], shape=(3,), dtype="float32", num_positions=3)
            tracks[key][rank] = Track(param, rank, points=[] if (rank, index) == (1, 1) else read)
        joined = Reduce(seq=4, impl="all_reduce", op="sum", group=(0, 1), params=1, root=root, **NOW)
        events[rank] = [joined] if rank in reduced else []
        events[rank].append(
            OptimizerStep(seq=5, optimizer="SGD", params=0, grads_missing=missing if rank else 0, **NOW)
        )
    return StepData(0, events, sets, tracks, True)


def test_what_was_reduced_as_zeros_and_never_given_to_the_parameter_leaves_a_step_open() -> None:
    [reason] = not_attached(parts())
    assert "rank 1 steps without a gradient for 1 parameter whose gradients rank 0 reduced" in reason


@pytest.mark.parametrize(
    "data",
    [
        parts(reduced=()),  # an expert of rank 0's own
        parts(reduced=(0, 1)),  # both had one, and rank 1 let it go: its owner sends what it stepped
        parts(root=0),  # only the owner holds the result
        parts(missing=0),  # not sampled in this step
        parts(missing=None),
    ],
)
def test_a_gradient_that_is_missing_elsewhere_is_nothing_of_it(data: StepData) -> None:
    assert not_attached(data) == []

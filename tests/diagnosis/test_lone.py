"""What one data rank trains beside all that the others train, and that is reduced with nobody, is told."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_dist.diagnosis.steps.lone import ALONE, trained_alone
from gradcheck_dist.events import Param, Reduce
from gradcheck_dist.ledger.tracks import StepData, Track, Values

NAMES = ("embed", "norm", "head")
DRAWN = dict(zip(NAMES, np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32), strict=True))
APART = {0: 0, 1: 1}


def step(trained: dict[int, set[str]], reduced: set[str], untrained: dict[int, set[str]] | None = None,
         began: dict[str, np.ndarray] | None = None, exchanges: bool = False) -> StepData:  # fmt: skip
    """Two ranks: what each trains, what is reduced over both, and what a rank has beside that without a gradient."""
    tracks: dict[tuple[int, str], dict[int, Track]] = {}
    for rank in APART:
        for name in sorted(trained[rank] | (untrained or {}).get(rank, set())):
            param = Param(id=NAMES.index(name), name=name, shape=(8,), dtype="float32", num_positions=8)
            leaves = {(0, 0): (3, Values(np.ones(8)))} if name in trained[rank] else {}
            track = Track(param, rank, leaves=leaves, begun=(began or DRAWN)[name])
            track.exchanges = (1, (0, 1)) if exchanges and name == "head" else None
            tracks.setdefault((-1, name), {})[rank] = track
    events = {
        rank: [Reduce(impl="all_reduce", op="sum", group=(0, 1), params=0, seq=5, t_ns=0, step=0)] for rank in APART
    }
    sets = {rank: {0: tuple(NAMES.index(name) for name in sorted(reduced))} for rank in APART}
    return StepData(0, events, sets, tracks, complete=True)


def test_a_matrix_that_came_untied_on_a_rank_is_told_with_the_one_it_was_tied_to() -> None:
    tied = DRAWN | {"head": DRAWN["embed"]}
    (said,) = trained_alone(step({0: {"embed", "norm"}, 1: set(NAMES)}, {"embed", "norm"}, began=tied), APART)
    assert said.startswith(
        "head is on rank 1 alone, and began with the values of embed; nothing of that name is on rank 0"
    )


def test_copies_that_stay_behind_where_others_use_them_are_told() -> None:
    unused = step({0: {"embed", "norm"}, 1: set(NAMES)}, {"embed", "norm"}, untrained={0: {"head"}})
    (said,) = trained_alone(unused, APART)
    assert said.startswith("head is trained on rank 1 alone")
    assert ALONE in said


@pytest.mark.parametrize(
    ("data", "coordinate"),
    [
        (step({0: set(NAMES), 1: set(NAMES)}, {"embed", "norm"}), APART),  # the weights tell
        (step({0: {"embed"}, 1: set(NAMES)}, set(NAMES), untrained={0: {"norm", "head"}}), APART),  # zeros are reduced
        (step({0: {"embed", "norm"}, 1: {"embed", "head"}}, {"embed"}), APART),  # something of its own each
        (step({0: {"embed", "norm"}, 1: set(NAMES)}, set()), APART),  # trained apart
        (step({0: {"embed", "norm"}, 1: set(NAMES)}, {"embed", "norm"}), {0: 0, 1: 0}),  # parts of one model
        (step({0: {"embed", "norm"}, 1: set(NAMES)}, {"embed", "norm"}, exchanges=True), APART),  # an expert
    ],
)
def test_what_may_be_right_is_left_alone(data: StepData, coordinate: dict[int, int]) -> None:
    assert trained_alone(data, coordinate) == []

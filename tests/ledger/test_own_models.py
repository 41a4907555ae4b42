"""Groups of ranks that share no gradient and hold different models are told; copies and doubtful ones are not."""

from __future__ import annotations

import numpy as np

from gradcheck_dist.events import Param
from gradcheck_dist.ledger.apart import own_models, told_apart
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track

OWN = {0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}
"""Data coordinates with which each rank shares gradients."""
PARAM = Param(id=0, name="w", shape=(16,), dtype="float32", num_positions=16)
ONES = np.ones(16)


def draw(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=16)


def step(tracks: dict[ParamKey, dict[int, np.ndarray | None]]) -> StepData:
    """Tensors of one name that began otherwise have keys of their own, as ledger/names.py gives them."""
    return StepData(0, {}, {}, {
        key: {rank: Track(PARAM, rank, begun=begun) for rank, begun in of_rank.items()}
        for key, of_rank in tracks.items()
    }, True)  # fmt: skip


NORM: dict[int, np.ndarray | None] = dict.fromkeys(range(4), ONES)
FIRST: dict[int, np.ndarray | None] = dict.fromkeys((0, 1), draw(1))
SECOND: dict[int, np.ndarray | None] = dict.fromkeys((2, 3), draw(2))


def test_groups_that_hold_different_models_are_told() -> None:
    data = step({(-1, "norm"): NORM, (-1, "w (as on rank 0)"): FIRST, (-1, "w (as on rank 2)"): SECOND})
    assert own_models(data, OWN) == [[0, 1], [2, 3]]
    assert "0,1 | 2,3" in told_apart([[0, 1], [2, 3]])[0]


def test_copies_that_are_not_reduced_are_one_model() -> None:
    assert own_models(step({(-1, "norm"): NORM, (-1, "w"): FIRST | dict.fromkeys((2, 3), draw(1))}), OWN) == []


def test_experts_beside_what_is_shared_are_no_models() -> None:
    shared = dict.fromkeys(range(4), draw(3))
    data = step({(-1, "trunk"): shared, (-1, "w (as on rank 0)"): FIRST, (-1, "w (as on rank 2)"): SECOND})
    assert own_models(data, OWN) == []
    assert own_models(data, {rank: {0, 1, 2, 3} for rank in range(4)}) == []  # they share gradients


def test_where_nobody_looked_at_the_values_nothing_is_told() -> None:
    unseen: dict[int, np.ndarray | None] = dict.fromkeys((2, 3))
    data = step({(-1, "norm"): NORM, (-1, "w (as on rank 0)"): FIRST, (-1, "w (as on rank 2)"): unseen})
    assert own_models(data, OWN) == [] and told_apart([]) == []

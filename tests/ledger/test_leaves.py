"""Which ranks' gradients of a pass are copies of one, and which are summands."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_dist.events import Param
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.leaves import build_basis
from gradcheck_dist.ledger.tracks import Track, Values

GRADIENT = np.random.default_rng(0).standard_normal(64)
NOISE = np.random.default_rng(1).standard_normal(64)


@pytest.mark.parametrize(("apart", "columns"), [(0.0, 1), (1e-7, 1), (3e-3, 1), (0.1, 2), (1.0, 2)])
def test_gradients_that_differ_by_rounding_are_copies(apart: float, columns: int) -> None:
    param = Param(id=0, name="w", shape=(64,), dtype="float32", num_positions=64)
    tracks = {
        rank: Track(param, rank, leaves={(0, 0): (1, Values(GRADIENT * (1 + rank * apart * NOISE)))}) for rank in (0, 1)
    }
    of_one_batch = Contributions({}, coordinate={0: 0, 1: 0})
    basis = build_basis(tracks, of_one_batch)
    assert (len(basis), basis.summands[0, 0, 0]) == (columns, columns)


def test_summands_of_zeros_beside_others_are_empty() -> None:
    param = Param(id=0, name="w", shape=(64,), dtype="float32", num_positions=64)

    def empty(*gradients: np.ndarray) -> frozenset[int]:
        tracks = {rank: Track(param, rank, leaves={(0, 0): (1, Values(one))}) for rank, one in enumerate(gradients)}
        return build_basis(tracks, Contributions({}, coordinate=dict.fromkeys(tracks, 0))).empty

    assert empty(GRADIENT, NOISE, 0 * GRADIENT) == {2}
    assert empty(GRADIENT, NOISE) == empty(GRADIENT) == empty(0 * GRADIENT) == frozenset()

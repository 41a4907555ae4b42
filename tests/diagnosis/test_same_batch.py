"""GS701: ranks with the same labels and the same loss were fed one batch only if their gradients are the same too."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gradcheck_dist.diagnosis.rules.gs701_same_batch_on_ranks import _same_gradients
from gradcheck_dist.ledger.contributions import Contribution


@pytest.mark.parametrize(("noise", "same"), [(0.0, True), (0.01, True), (1.0, False)])
def test_one_loss_over_gathered_features_is_no_common_batch(noise: float, same: bool) -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=16)
    leaves = [values, values + noise * generator.normal(size=16)]
    tracks = {rank: SimpleNamespace(leaves={(0, 0): (1, SimpleNamespace(data=leaves[rank]))}) for rank in (0, 1)}
    facts = SimpleNamespace(data=SimpleNamespace(tracks={"weight": tracks}))
    one, other = (Contribution((rank, 0, 0), (rank,), 6, 1.0, loss_rank=rank) for rank in (0, 1))
    assert _same_gradients(facts, other, one) is same  # type: ignore[arg-type]

"""Why a gradient's weights are not known: it is zero, or its summands on several ranks are the same."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gradcheck_dist.diagnosis.weights.cells import SUMMANDS_ALIKE, TOO_SMALL, Held, judge
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.leaves import Basis

OWN = np.array([1.0, -2.0, 0.5])


@pytest.mark.parametrize(
    ("summands", "why"),
    [([OWN, OWN], SUMMANDS_ALIKE), ([OWN, 0 * OWN], TOO_SMALL), ([0 * OWN, 0 * OWN], TOO_SMALL), ([OWN], TOO_SMALL)],
)
def test_why_no_weight_is_known(summands: list[np.ndarray], why: str) -> None:
    keys = [(0, 0, 0)] * len(summands)
    basis = Basis(keys, [0] * len(keys), {}, np.array(summands), {keys[0]: len(keys)})
    unknown = np.full(len(summands), np.nan)
    replay: Any = SimpleNamespace(basis=basis, epsilon=2.0**-24, history=lambda rank: [])
    held = Held((-1, "w"), 0, replay, unknown, unknown, unknown, visible=[True] * len(keys))
    loss = SimpleNamespace(weight=1.0, spread=0.0, loss=None, num_tokens=8)
    contributions = cast(Contributions, SimpleNamespace(by_key={keys[0]: loss}))
    (judged,) = judge([held], contributions, {keys[0]: Fraction(1, 8)})
    assert (judged.cells, judged.reason) == ([], why)

"""What weights are compared with where a loss counts nothing: the transfer that most of them have."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradcheck_dist.diagnosis.losses.aims import _usual
from gradcheck_dist.diagnosis.open_cases.unusual import unusual
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey

KEYS: list[ContributionKey] = [(rank, k, 0) for rank in range(2) for k in range(4)]
BY_KEY = {key: Contribution(key, (key[0],), None, None) for key in KEYS}


def held(rank: int, observed: list[float], nominal: float | None = None) -> Held:
    replay: Any = SimpleNamespace(basis=SimpleNamespace(keys=KEYS, origin=[key[0] for key in KEYS]))
    values = np.array(observed)
    told = values if nominal is None else np.full(len(KEYS), nominal)
    return Held((-1, "w"), rank, replay, values, np.full(len(KEYS), 1e-9), told, visible=[True] * len(KEYS))


def test_what_came_to_some_copies_only_is_no_example() -> None:
    """Reduced in the first of four passes: six weights are 1, but on one rank each."""
    measured = [held(0, [0.5, 1, 1, 1, 0.5, 0, 0, 0]), held(1, [0.5, 0, 0, 0, 0.5, 1, 1, 1])]
    assert _usual(measured, BY_KEY) == Fraction(1, 2)


def test_where_nothing_else_arrived_it_is_one() -> None:
    assert _usual([held(0, [1] * 4 + [0] * 4), held(1, [0] * 4 + [1] * 4)], BY_KEY) == 1


def test_of_two_ranks_the_one_is_right_whose_lines_did_less() -> None:
    """One of them multiplies by 2 what both have divided, which its records know of neither."""
    measured = [held(0, [0.5] * 8), held(1, [1] * 8)]
    assert _usual(measured, BY_KEY, {0: 1, 1: 2}) == Fraction(1, 2)


def test_what_arrived_on_the_rank_whose_lines_did_less_is_right() -> None:
    """One of them multiplies its own by 2 before all are added up and divided: both hold the same."""
    measured = [held(rank, [0.5] * 4 + [1] * 4, nominal=1.0) for rank in range(2)]
    assert _usual(measured, BY_KEY, {0: 1, 1: 2}) == Fraction(1, 2)


def test_what_the_losses_ask_for_is_taken_where_some_weights_have_it() -> None:
    """Most gradients are summed; ranks' means ask for their average."""
    measured = [held(rank, [value] * 8) for rank in range(2) for value in (1, 1, 0.5)]
    assert _usual(measured, BY_KEY, {}, 0.5) == Fraction(1, 2)
    assert _usual(measured, BY_KEY, {}, 0.25) == _usual(measured, BY_KEY) == 1


def test_of_ranks_with_nearly_as_many_shards_the_one_is_right_whose_lines_did_less() -> None:
    """A clip by hand acts on the rank that holds a few more shards."""
    measured = [*(held(0, [0.5] * 8) for _ in range(5)), *(held(1, [0.37] * 8) for _ in range(6))]
    for one in measured:
        one.replay.basis.origin[:] = [one.rank] * len(KEYS)
    assert _usual(measured, BY_KEY, {0: 0, 1: 1}) == Fraction(1, 2)
    assert float(_usual(measured, BY_KEY, {0: 0, 1: 0})) == 0.37


@pytest.mark.parametrize(
    ("relative", "kind", "unrecorded"), [(False, "loss", False), (True, "reduce", False), (True, "loss", True)]
)
def test_a_loss_is_accused_of_what_is_unusual_only_where_its_own_weight_is_known(
    relative: bool, kind: str, unrecorded: bool
) -> None:
    def case(relative: bool, kind: str, unrecorded: bool) -> Any:
        context, culprit = SimpleNamespace(relative=relative), SimpleNamespace(kind=kind, unrecorded=unrecorded)
        return SimpleNamespace(context=context, culprit=culprit, pattern=SimpleNamespace(factor=1.37))

    data: Any = None
    assert unusual(case(relative, kind, unrecorded), data) is None
    assert "x 1.37 of what others are" in (unusual(case(True, "loss", False), data) or "")

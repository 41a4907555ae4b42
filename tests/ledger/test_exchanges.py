"""What the backward of an exchange owes, out of what ranks gave, made and got back."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_dist.events import Event, Exchange
from gradcheck_dist.ledger.exchanges import Passed, passed

RANKS = (0, 1, 2)


def exchange(given: list[np.ndarray], made: list[np.ndarray], arrived: list[np.ndarray], back: list[np.ndarray],
             dtype: str = "float32", collectives: tuple[str, ...] = ("all_reduce",)) -> Exchange:  # fmt: skip
    return Exchange(
        seq=2, t_ns=0, step=0, function="Made", group=RANKS, index=0, accumulation_step=0, microbatch=0,
        input_counts=tuple(map(len, given)), output_counts=tuple(map(len, made)), dtype=dtype,
        collectives=collectives,
        values=np.concatenate([*given, *made, *arrived, *back]).astype("<f4").tobytes(),
    )  # fmt: skip


def outcome(*of_ranks: Exchange) -> Passed | None:
    events: dict[int, list[Event]] = {rank: [event] for rank, event in enumerate(of_ranks)}
    return next(passed(events), None)


def drawn(seed: int, count: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count)


def a_sum(gradients: list[np.ndarray], back: list[np.ndarray], scale: float = 1.0, dtype: str = "float32",
          given: list[np.ndarray] | None = None) -> Passed | None:  # fmt: skip
    given = given or [drawn(rank) for rank in RANKS]
    total = scale * sum(given)
    return outcome(
        *(exchange([given[rank]], [total], [gradients[rank]], [back[rank]], dtype) for rank in RANKS)
    )  # fmt: skip


def test_what_a_sum_owes_follows_from_what_arrives() -> None:
    whole, parts = [drawn(9)] * 3, [drawn(10 + rank) for rank in RANKS]
    cases = [
        (whole, whole, 1.0, ("right", 1.0)),
        (whole, [3 * drawn(9)] * 3, 1.0, ("scaled", 3.0)),
        (parts, parts, 1.0, ("own", 1.0)),
        (parts, [sum(parts)] * 3, 1.0, ("right", 1.0)),
        (parts, [sum(parts) / 3] * 3, 1 / 3, ("right", 1.0)),
        (parts, [np.zeros(32)] * 3, 1.0, ("lost", 0.0)),
        (parts, [drawn(20 + rank) for rank in RANKS], 1.0, ("other", 1.0)),
    ]
    for gradients, back, scale, expected in cases:
        found = a_sum(gradients, back, scale)
        assert found is not None and found.forward == "sum"
        assert (found.outcome, found.factor) == (expected[0], pytest.approx(expected[1], rel=1e-5))


def test_a_sum_by_hand_of_what_was_gathered_is_a_sum() -> None:
    """It is recorded in as many parts as an all-to-all that is made of a gather."""
    given, gradients = ([drawn(seed + rank, 30) for rank in RANKS] for seed in (0, 10))
    total, whole = sum(given), sum(gradients)
    found = outcome(
        *(
            exchange(
                *(np.split(side, len(RANKS)) for side in (given[rank], total, gradients[rank], 0.5 * whole)),
                collectives=("all_gather",),
            )
            for rank in RANKS
        )
    )
    assert found is not None and (found.forward, found.outcome) == ("sum", "scaled")
    assert found.factor == pytest.approx(0.5)


def test_what_cannot_be_told_is_left_out() -> None:
    parts = [drawn(10 + rank) for rank in RANKS]
    assert a_sum(parts, parts, given=[drawn(0)] * 3) is None, "inputs that are alike tell no sum from a copy"
    nearly = [drawn(9) + 0.01 * part for part in parts]
    assert a_sum(nearly, nearly) is None, "neither copies nor summands"
    assert a_sum([np.zeros(32)] * 3, [np.zeros(32)] * 3) is None
    assert a_sum([np.full(32, np.nan)] * 3, parts) is None
    rounded = [part * (1 + 0.1 * np.sign(drawn(30 + rank))) for rank, part in enumerate([sum(parts)] * 3)]
    assert a_sum(parts, rounded) is None, "a compressed gradient is no other one"
    strange = [exchange([drawn(rank)], [drawn(rank + 40)], [drawn(9)], [drawn(9)]) for rank in RANKS]
    assert outcome(*strange) is None, "forward is nothing that is known"
    assert outcome(*strange[:2]) is None, "a rank's record is missing"
    cut = exchange([drawn(0)], [drawn(1)], [drawn(2)], [drawn(3)])
    cut.values = cut.values[:-4]
    assert outcome(cut, *strange[1:]) is None


def test_parts_of_unlike_lengths_are_matched_by_rank() -> None:
    lengths = [[3, 5, 0], [2, 4, 6], [7, 1, 2]]  # from row rank to column rank
    sent = [[drawn(10 * one + other, lengths[one][other]) for other in RANKS] for one in RANKS]
    grads = [[drawn(100 + 10 * one + other, lengths[other][one]) for other in RANKS] for one in RANKS]
    made = [[sent[other][one] for other in RANKS] for one in RANKS]
    back = [[grads[other][one] for other in RANKS] for one in RANKS]
    found = outcome(*(exchange(sent[r], made[r], grads[r], back[r]) for r in RANKS))
    assert found is not None and (found.forward, found.outcome) == ("all-to-all", "right")
    half = [[part / 2 for part in of_rank] for of_rank in back]
    found = outcome(*(exchange(sent[r], made[r], grads[r], half[r]) for r in RANKS))
    assert found is not None and (found.outcome, found.factor) == ("scaled", pytest.approx(0.5))


def test_what_goes_round_a_ring_is_owed_from_where_it_came_out() -> None:
    given, arrived = [drawn(rank) for rank in RANKS], [drawn(10 + rank) for rank in RANKS]
    right = [arrived[rank - 1] for rank in RANKS]  # each rank has the next one's, and sends its gradient there

    def ring(made: list[np.ndarray], back: list[np.ndarray]) -> Passed | None:
        return outcome(
            *(exchange([given[r]], [made[r]], [arrived[r]], [back[r]], collectives=("send",)) for r in RANKS)
        )

    made = [given[(rank + 1) % 3] for rank in RANKS]
    for back, expected in ((right, "right"), ([2 * one for one in right], "scaled"), (arrived, "other")):
        found = ring(made, back)
        assert found is not None and (found.forward, found.outcome) == ("move", expected)
    assert ring(given, arrived) is None, "what is sent besides comes out elsewhere"
    assert ring([given[1], given[0], given[0]], right) is None, "the last rank's went elsewhere"
    assert ring([drawn(30 + rank) for rank in RANKS], right) is None


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "right"), (0.5, "scaled"), (0.0, "lost")])
def test_one_tensor_that_goes_to_both_neighbours_is_owed_both_gradients(factor: float, expected: str) -> None:
    """open_clip's SigLIP loss: each rank's features go to the left and to the right in one application."""
    given, arrived = [drawn(rank) for rank in RANKS], [[drawn(10 + rank), drawn(20 + rank)] for rank in RANKS]

    def applied(rank: int) -> Exchange:
        left, right = (rank - 1) % 3, (rank + 1) % 3
        back = [factor * arrived[left][1], factor * arrived[right][0]]  # whose right and left neighbour this rank is
        return exchange([given[rank]] * 2, [given[left], given[right]], arrived[rank], back, collectives=("send",))

    found = outcome(*map(applied, RANKS))
    assert found is not None and (found.forward, found.outcome, found.factor) == ("move", expected, factor)


def test_low_precision_is_judged_by_its_own_rounding() -> None:
    parts = [drawn(10 + rank) for rank in RANKS]
    rough = [sum(parts) * (1 + 0.004 * np.sign(drawn(30 + rank))) for rank in RANKS]
    found = a_sum(parts, rough, dtype="bfloat16")
    assert found is not None and found.outcome == "right"
    assert a_sum(parts, rough) is None


@pytest.mark.parametrize(("scale", "mixed"), [(1.0, True), (1 / 3, True), (0.3, False)])
def test_a_sum_of_gradients_of_unlike_inputs_is_none_of_theirs(scale: float, mixed: bool) -> None:
    """Megatron's f over a group that holds other data as well."""
    given, gradients = [drawn(rank) for rank in RANKS], [drawn(10 + rank) for rank in RANKS]
    total = scale * sum(gradients)
    backs = {"mixed": [total] * len(RANKS), "own": gradients}
    found = {
        name: outcome(
            *(exchange([given[rank]], [given[rank]], [gradients[rank]], [back[rank]], collectives=()) for rank in RANKS)
        )
        for name, back in backs.items()
    }
    assert found["own"] is None
    assert (found["mixed"] is not None and found["mixed"].outcome == "mixed") == mixed

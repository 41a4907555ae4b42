"""What a line did to all gradients, of which one is wrong for another reason that was recorded."""

from __future__ import annotations

import pytest
from reduced_steps import all_reduce, begun, ended
from simulator import AFTER, BEFORE, Buffer, Reduce

RANKS, UNDONE, AGAIN = 2, 40, 50


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_a_second_sum_is_the_fault_and_the_line_before_it_is_none(factor: float) -> None:
    """All gradients are summed, and a line multiplies them as their losses ask for, by what the second sum does or by
    another number; one is summed again behind it."""
    everyone = tuple(range(RANKS))
    world = begun(RANKS, factor=1 / factor)
    all_reduce(world, (everyone,), UNDONE)
    for rank in world.ranks:
        rank.grad = {name: Buffer(one.values * factor, one.weights * factor) for name, one in rank.grad.items()}
    again = next(iter(world.ranks[0].ids))
    for rank in world.ranks:
        seq = rank.next_seq()
        rank.sample_grads(seq, BEFORE, [again])
        one = rank.grad[again]
        rank.grad[again] = Buffer(one.values * RANKS, one.weights * RANKS)
        rank.sample_grads(seq, AFTER, [again])
        rank.emit(Reduce, seq=seq, line=AGAIN, impl="all_reduce", op="sum", group=everyone,
                  params=rank.param_set([again]), accumulation_step=1)  # fmt: skip
    (finding,) = ended(world).findings
    assert (finding.code, finding.factor.observed) == ("GS102", pytest.approx(RANKS))
    assert finding.first_event is not None and finding.first_event.line == AGAIN

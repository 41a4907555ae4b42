"""Ranks with the same labels share their tokens by design, or were fed the same batch: who reduces with whom tells."""

from __future__ import annotations

import pytest

from gradcheck_dist.events import Event, Loss, LossGradient, Reduce
from gradcheck_dist.ledger.contributions import collect


def step(rank: int, labels: int, group: list[int], replicas: list[int] | None = None) -> list[Event]:
    return [
        Loss(seq=1, t_ns=0, step=0, loss_id=1, reduction="sum", num_tokens=5, label_hash=labels),
        LossGradient(seq=2, t_ns=0, step=0, loss_id=1, accumulation_step=0, microbatch=0, weight=1.0, num_tokens=5),
        Reduce(
            seq=3,
            t_ns=0,
            step=0,
            impl="fsdp",
            op="sum",
            group=tuple(group),
            params=0,
            replicate_group=tuple(replicas or ()),
        ),
    ]


@pytest.mark.parametrize(
    ("labels", "groups", "together"),
    [
        ([1, 1, 2, 2], [[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 1], [2, 3]]),  # dp x tp
        ([1, 1, 1, 1], [[0, 2], [1, 3], [0, 2], [1, 3]], [[0, 1], [2, 3]]),  # the same, all fed one batch
        ([1, 1, 1, 1], [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3]]),  # tp x dp, fed one batch
        ([1, 1, 1], [[0, 1, 2]] * 3, [[0], [1], [2]]),  # dp, fed one batch
    ],
)
def test_peers_of_a_reduction_never_share_tokens_by_design(
    labels: list[int], groups: list[list[int]], together: list[list[int]]
) -> None:
    events = {rank: step(rank, labels[rank], groups[rank]) for rank in range(len(labels))}
    assert collect(events).ranks_of_coordinates() == together


def test_peers_are_those_of_shards_and_of_replicas_and_theirs() -> None:
    shards, replicas = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]
    events = {rank: step(rank, 1, shards[rank], replicas[rank]) for rank in range(4)}
    found = collect(events)
    assert found.ranks_of_coordinates() == [[0], [1], [2], [3]]
    assert "same labels reduce gradients together" in found.coordinate_from

"""Which parameters that began alike may be shards, by their sizes and by what stands beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradcheck_dist.diagnosis.open_cases.own_shards import _Shards, _whole_on_stages
from gradcheck_dist.events import Param
from gradcheck_dist.ledger.parted import Sizes, _part_sizes

WIDTH, INNER = 32, 32
"""The inner layer is as many times wider as there are ranks, so that a part of it is as wide as the model."""
PARTED = {
    "mlp.up.weight": (INNER, WIDTH),
    "mlp.down.weight": (WIDTH, INNER),
    "attention.q": (16, WIDTH),
    "attention.out": (WIDTH, 16),
}
ALIKE = {
    "norm.weight": ((WIDTH,), False),
    "mlp.norm.weight": ((INNER,), True),
    "mlp.scale": ((INNER,), True),
    "attention.k": ((16, WIDTH), True),
    "mlp.gate.weight": ((INNER, WIDTH), True),
    "mlp.adapter.out.weight": ((INNER, 4), True),
}
"""Shapes, and whether a part may have them."""


@pytest.mark.parametrize("name", ALIKE)
def test_a_part_as_wide_as_the_model_is_told_from_copies_by_its_place(name: str) -> None:
    shape, may_be = ALIKE[name]
    names = {f"{own} (as on rank {rank})": size for own, size in PARTED.items() for rank in (0, 1)} | {name: shape}
    tracks = {(0, own): {rank: SimpleNamespace(param=_param(size)) for rank in (0, 1)} for own, size in names.items()}
    sizes = Sizes(parts=frozenset({16, INNER}), shared=frozenset({WIDTH}))
    data: Any = SimpleNamespace(tracks=tracks, sizes=sizes, events={0: [], 1: []})
    assert _Shards(data).may_hold((0, name)) is may_be


def _param(shape: tuple[int, ...]) -> Param:
    return Param(id=0, name="", shape=shape, dtype="float32", num_positions=1)


def test_a_vector_as_long_as_whole_layers_tells_no_size_of_parts() -> None:
    """Experts' second biases are as long as the model is wide."""
    shapes = {"up.weight": (64, WIDTH), "up.bias": (64,), "down.weight": (WIDTH, 64), "down.bias": (WIDTH,)}
    assert _part_sizes(map(_param, shapes.values()), {WIDTH}) == {64}
    assert _part_sizes([_param((WIDTH,))], {WIDTH}) == {WIDTH}
    assert _part_sizes(map(_param, [(INNER, WIDTH), (16, WIDTH)]), {WIDTH}) == {INNER, 16}


@pytest.mark.parametrize(("alike", "whole"), [(True, True), (False, False)])
def test_a_tied_matrix_is_no_shard_where_the_ranks_of_each_stage_got_one_gradient_of_it(
    alike: bool, whole: bool
) -> None:
    """Two stages of two tensor-parallel ranks each."""
    tracks = {}
    for rank in range(4):
        param = Param(
            id=0, name="tok" if rank < 2 else "head", shape=(8, 4), dtype="float32", num_positions=2, stage=rank // 2
        )
        got = np.array([1.0, 2.0 if alike else 2.0 + rank])
        leaves = {(0, 0): (None, SimpleNamespace(data=got, partial=False))}
        tracks[rank] = SimpleNamespace(param=param, begun=np.array([3.0, 4.0]), leaves=leaves)
    key = (0, "tok")
    contributions = SimpleNamespace(coordinate=dict.fromkeys(range(4), 0))
    case: Any = SimpleNamespace(context=SimpleNamespace(contributions=contributions))
    data: Any = SimpleNamespace(tracks={key: tracks}, tied={key: [(1, "head")]})
    assert _whole_on_stages(key, case, data) is whole

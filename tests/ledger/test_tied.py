"""When two matrices on two pipeline stages are one: by how they began, and by what else began alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradcheck_dist.events import Header, Param
from gradcheck_dist.ledger.tied import beside, ties, ties_and_doubts
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run

EMBEDDING: dict[str, Any] = {"name": "embedding.weight", "start": 1, "looked_up": True}
HEAD: dict[str, Any] = {"name": "head.weight", "start": 1}
FIRST: dict[str, Any] = {"name": "layers.0.weight", "start": 2}
LAST: dict[str, Any] = {"name": "layers.1.weight", "start": 3}
TIED = {(1, "head.weight"): (0, "embedding.weight")}


def tied_of(*ranks: tuple[int, list[dict[str, Any]]]) -> dict[ParamKey, ParamKey]:
    """The ties of a run, each rank given as (stage, its parameters)."""
    return ties(run_of(*ranks))


def perhaps_of(*ranks: tuple[int, list[dict[str, Any]]]) -> list[tuple[ParamKey, ParamKey]]:
    return ties_and_doubts(run_of(*ranks))[1]


def run_of(*ranks: tuple[int, list[dict[str, Any]]]) -> Run:
    run = Run(Path(), {})
    for rank, (stage, params) in enumerate(ranks):
        header = Header(schema_version=1, tool_version="", rank=rank, world_size=len(ranks), pid=1, started_unix_s=0.0)
        run.ranks[rank] = RankTrace(Path(), header)
        for id, values in enumerate(params):
            usual: dict[str, Any] = {"shape": (8, 4), "dtype": "float32", "num_positions": 32, "stage": stage}
            run.ranks[rank].params[id] = Param(id=id, **usual | values)
    return run


def test_an_embedding_that_began_as_another_stages_matrix_is_tied_to_it() -> None:
    assert tied_of((0, [EMBEDDING, FIRST]), (1, [LAST, HEAD])) == TIED


def test_replicas_and_shards_are_tied_as_a_whole() -> None:
    other: dict[str, Any] = {"start": 7, "placements": "(Shard(dim=0),)"}
    shard: dict[str, Any] = {"placements": "(Shard(dim=0),)"}
    first = [(0, [EMBEDDING | shard, FIRST]), (0, [EMBEDDING | other, FIRST])]
    last = [(1, [LAST, HEAD | shard]), (1, [LAST, HEAD | other])]
    assert tied_of(*first, *last) == TIED


def test_three_stages_share_one_first_copy() -> None:
    middle = [{"name": "decoder.weight", "start": 1, "looked_up": True}, {"name": "layers.2.weight", "start": 5}]
    found = tied_of((0, [EMBEDDING, FIRST]), (1, middle), (2, [LAST, HEAD]))
    assert found == {(1, "decoder.weight"): (0, "embedding.weight"), (2, "head.weight"): (0, "embedding.weight")}


UNTIED: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "values differ": ([EMBEDDING, FIRST], [LAST, HEAD | {"start": 4}]),
    "shapes differ": ([EMBEDDING, FIRST], [LAST, HEAD | {"shape": (4, 8)}]),
    "dtypes differ": ([EMBEDDING, FIRST], [LAST, HEAD | {"dtype": "bfloat16"}]),
    "all one number": ([EMBEDDING | {"start": None}, FIRST], [LAST, HEAD | {"start": None}]),
    "no embedding": ([EMBEDDING | {"looked_up": False}, FIRST], [LAST, HEAD]),
    "frozen": ([EMBEDDING, FIRST], [LAST, HEAD | {"requires_grad": False}]),
    "one seed draws all alike": ([EMBEDDING, FIRST], [LAST | {"start": 2}, HEAD]),
    "nothing but the head tells seeds apart": ([EMBEDDING, FIRST], [HEAD]),
}


@pytest.mark.parametrize(("first", "last"), UNTIED.values(), ids=UNTIED)
def test_what_may_have_begun_alike_by_chance_is_not_tied(
    first: list[dict[str, Any]], last: list[dict[str, Any]]
) -> None:
    assert tied_of((0, first), (1, last)) == {}


NORM: dict[str, Any] = {"name": "norm.weight", "start": None, "shape": (4,)}


def test_a_head_beside_nothing_but_a_norm_is_perhaps_tied() -> None:
    pair = ((0, "embedding.weight"), (1, "head.weight"))
    assert perhaps_of((0, [EMBEDDING, FIRST]), (1, [NORM, HEAD])) == [pair]
    assert perhaps_of((0, [EMBEDDING]), (1, [NORM, LAST, HEAD])) == [pair]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ([EMBEDDING, FIRST], [LAST, HEAD]),
        ([EMBEDDING, FIRST], [NORM, HEAD | {"start": 4}]),
        ([EMBEDDING, FIRST], [NORM, HEAD | {"looked_up": True}]),
        ([EMBEDDING, FIRST], [LAST | {"start": 2}, HEAD]),
        ([EMBEDDING], [HEAD, HEAD | {"name": "other.weight"}]),
    ],
    ids=["surely tied", "other values", "a table each", "one seed draws all alike", "two of them"],
)
def test_others_are_not(first: list[dict[str, Any]], last: list[dict[str, Any]]) -> None:
    assert perhaps_of((0, first), (1, last)) == []


def test_both_on_one_rank_are_left_apart() -> None:
    here = [EMBEDDING, FIRST, LAST | {"stage": 1}, HEAD | {"stage": 1}]
    assert tied_of((0, here)) == {}


def test_copies_on_one_rank_are_beside_one_another_and_not_joined() -> None:
    run = Run(Path(), {})
    header = Header(schema_version=1, tool_version="", rank=0, world_size=1, pid=1, started_unix_s=0.0)
    run.ranks[0] = RankTrace(Path(), header)
    held = [(0, EMBEDDING), (0, FIRST), (3, LAST), (3, HEAD)]
    for id, (stage, values) in enumerate(held):
        usual: dict[str, Any] = {"shape": (8, 4), "dtype": "float32", "num_positions": 32, "stage": stage}
        run.ranks[0].params[id] = Param(id=id, **usual | values)
    names = {(0, id): (stage, values["name"]) for id, (stage, values) in enumerate(held)}
    first, last = (0, "embedding.weight"), (3, "head.weight")
    assert (ties(run, names), beside(run, names)) == ({}, {first: last, last: first})

"""Biases that began as zeros on every rank: parts or copies, by what their module says, else as their weight is."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

from gradcheck_dist.events import Event, Header, Param, ParamSet, Reduce
from gradcheck_dist.ledger.names import crossed, distinct_names
from gradcheck_dist.probes.parameters.identity import is_expert, partitioned
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run

ZEROS = zlib.crc32(bytes(32))


def run_of(weight: bool | None, bias: bool | None, reduced: bool) -> Run:
    """Two ranks that hold unlike weights; `reduced`: a collective combines their biases' gradients."""
    run = Run(Path(), {})
    for rank in (0, 1):
        header = Header(schema_version=1, tool_version="", rank=rank, world_size=2, pid=1, started_unix_s=0.0)
        trace = run.ranks[rank] = RankTrace(Path(), header)
        for id, (name, began, told) in enumerate((("w.weight", 7 + rank, weight), ("w.bias", ZEROS, bias))):
            trace.params[id] = Param(
                id=id, name=name, shape=(8,), dtype="float32", num_positions=8, fingerprint=began, partitioned=told
            )
        trace.param_sets[0] = ParamSet(id=0, params=(1,)).params
        if reduced:
            trace.events.append(Reduce(seq=5, t_ns=0, step=0, impl="all_reduce", op="sum", params=0, group=(0, 1)))
    return run


@pytest.mark.parametrize(
    ("weight", "bias", "reduced", "copies"),
    [
        (True, True, False, False),
        (True, True, True, False),  # parts that are summed all the same are parts
        (True, None, False, True),  # a copy whose sum never came is a copy
        (True, False, False, True),
        (True, None, True, True),
        (None, None, False, False),
        (None, None, True, True),
    ],
)
def test_a_bias_of_zeros_is_a_copy_or_a_part(
    weight: bool | None, bias: bool | None, reduced: bool, copies: bool
) -> None:
    run = run_of(weight, bias, reduced)
    events: dict[int, list[Event]] = {rank: list(trace.events) for rank, trace in run.ranks.items()}
    names = distinct_names(run)
    names |= crossed(run, events, names)
    assert (names[0, 1] == names[1, 1]) is copies
    assert names[0, 0] != names[1, 0]


def test_megatron_and_transformer_engine_tell_by_an_attribute() -> None:
    weight = nn.Parameter(torch.zeros(2))
    assert partitioned(weight) is None
    for told in (True, False):
        weight.tensor_model_parallel = told  # type: ignore[attr-defined]
        assert partitioned(weight) is told


def test_megatron_and_deepspeed_tell_experts_by_an_attribute() -> None:
    weight = nn.Parameter(torch.zeros(2))
    assert not is_expert(weight)
    for told in (True, False):
        weight.allreduce = told  # type: ignore[attr-defined]
        assert is_expert(weight) is not told


@pytest.mark.parametrize(("expert", "parts"), [(True, {0: 0, 1: 1, 2: 0, 3: 1}), (False, dict.fromkeys(range(4), 0))])
def test_experts_of_one_seed_are_one_where_they_are_reduced_together(expert: bool, parts: dict[int, int]) -> None:
    """Four data ranks in two expert-parallel groups, (0, 1) and (2, 3): copies lie on ranks 0, 2 and 1, 3."""
    run = Run(Path(), {})
    for rank in range(4):
        header = Header(schema_version=1, tool_version="", rank=rank, world_size=4, pid=1, started_unix_s=0.0)
        trace = run.ranks[rank] = RankTrace(Path(), header)
        trace.params[0] = Param(
            id=0, name="w", shape=(8,), dtype="float32", num_positions=8, fingerprint=7, expert=expert
        )
        trace.param_sets[0] = ParamSet(id=0, params=(0,)).params
        group = (rank % 2, rank % 2 + 2)
        trace.events.append(Reduce(seq=5, t_ns=0, step=0, impl="all_reduce", op="sum", params=0, group=group))
    names = distinct_names(run)
    assert {rank: min(other for other in range(4) if names[other, 0] == names[rank, 0]) for rank in range(4)} == parts

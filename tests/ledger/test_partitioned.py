"""Biases that began as zeros on every rank: parts or copies, by what their module says, else as their weight is."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradcheck_dist.events import Backward, Event, Exchange, Header, Loss, LossGradient, Param, ParamSet, Reduce
from gradcheck_dist.ledger.names import crossed, distinct_names, names_and_sizes
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


NOW: dict[str, Any] = {"t_ns": 0, "step": 0}


def two_ranks(**held: tuple[tuple[int, ...], bool]) -> Run:
    """Two ranks with parameters of these shapes, that began with other values on each, or alike."""
    run = Run(Path(), {})
    for rank in (0, 1):
        header = Header(schema_version=1, tool_version="", rank=rank, world_size=2, pid=1, started_unix_s=0.0)
        trace = run.ranks[rank] = RankTrace(Path(), header)
        for id, (name, (shape, alike)) in enumerate(held.items()):
            began = 100 + 10 * id + (0 if alike else rank)
            trace.params[id] = Param(
                id=id, name=name.replace("_", "."), shape=shape, dtype="float32", num_positions=8, fingerprint=began,
                start=began,
            )  # fmt: skip
    return run


def test_the_size_that_all_parts_have_is_no_whole_layers_where_copies_tell_the_width() -> None:
    """Adapters of tensor-parallel layers: of the first one the small factor is a copy, of the second one the other."""
    run = two_ranks(
        head=((32, 16), True),
        up_weight=((20, 16), False), up_a=((4, 16), True), up_b=((20, 4), False),
        down_weight=((16, 20), False), down_a=((4, 20), False), down_b=((16, 4), True),
    )  # fmt: skip
    names, sizes = names_and_sizes(run)
    assert sizes.parts == {20}
    assert {id for id in range(7) if names[0, id] == names[1, id]} == {0, 2, 6}


def test_a_matrix_of_one_seed_is_not_parted_as_others_in_its_module() -> None:
    """Keys of one head that all ranks share are as large as the part of the queries that each rank holds."""
    run = two_ranks(
        word=((32, 16), True),
        attention_q=((8, 16), False), attention_o=((16, 8), False),
        attention_k=((8, 16), True), attention_norm_weight=((8,), True),
        up_weight=((8, 16), False), up_scale=((8,), True),
    )  # fmt: skip
    names, sizes = names_and_sizes(run)
    assert sizes.parts == {8}
    assert {id for id in range(7) if names[0, id] == names[1, id]} == {0, 3, 4}


@pytest.mark.parametrize("hidden", [24, 16])
def test_a_square_part_is_a_matrix_as_well(hidden: int) -> None:
    """Where the inner layer is as many times wider as there are ranks. An adapter's second factor is a copy."""
    run = two_ranks(
        word=((32, 16), True), mlp_up=((hidden, 16), False), mlp_down=((16, hidden), False),
        mlp_a=((4, hidden), False), mlp_b=((16, 4), True),
    )  # fmt: skip
    names, _ = names_and_sizes(run)
    assert {id for id in range(5) if names[0, id] == names[1, id]} == {0, 4}


@pytest.mark.parametrize("combine", [True, False])
def test_layers_of_two_stages_are_no_parts_of_one(combine: bool) -> None:
    """A pipeline by hand: the rank without a loss runs another stage, unless ranks combine activations. A loss that
    counts nothing is what a stage's own send gave."""
    run = two_ranks(layer_weight=((16, 16), False), word=((32, 16), True))
    for rank, trace in run.ranks.items():
        count = {"op": "unknown", "reduction": "unknown"} if rank == 0 else {"num_tokens": 3}
        trace.events.append(Loss(seq=1, loss_id=1, **count, **NOW))
        trace.events.append(Backward(seq=2, accumulation_step=0, microbatch=0, params=None, duration_ns=0, **NOW))
        trace.events.append(LossGradient(seq=3, loss_id=1, accumulation_step=0, microbatch=0, weight=1.0, **NOW))
        if combine:
            trace.events.append(
                Exchange(seq=4, function="f", group=(0, 1), index=0, accumulation_step=0, microbatch=0,
                         input_counts=(8,), output_counts=(8,), values=b"", **NOW)
            )  # fmt: skip
    names, sizes = names_and_sizes(run)
    assert bool(sizes.parts) is combine
    assert names[0, 1] != names[1, 1], "another stage's, until their values tell that they are tied"

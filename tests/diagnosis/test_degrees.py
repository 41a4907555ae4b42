"""Degrees that no reduction names: of ranks that exchange activations."""

from __future__ import annotations

import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.events import AmpScale, AmpUnscale, Exchange
from gradcheck_dist.trace.run import Run


def run_of(data_ranks: int, group_size: int) -> Run:
    """Ranks that reduce over all, in groups of neighbours that exchange activations."""
    run = World(Trainer(root=global_mean(), op="sum", data_ranks=data_ranks)).run()
    for rank, trace in run.ranks.items():
        first = rank - rank % group_size
        group = tuple(range(first, first + group_size))
        event = Exchange(
            seq=1_000_000, t_ns=0, step=0, function="Sum", group=group, index=0, accumulation_step=0, microbatch=0,
            input_counts=(1,), output_counts=(1,), values=bytes(16),
        )  # fmt: skip
        trace.events.append(event)
    return run


def test_ranks_with_tokens_of_their_own_that_exchange_activations_are_a_degree() -> None:
    context = judge_step(run_of(4, 2), 0, "global-token-mean", "given").context
    assert (context.quantities["ranks_per_exchange"], context.quantities["exchange_groups"]) == (2.0, 2.0)
    assert context.axes["tp"] == 1


def test_a_group_of_all_ranks_is_the_world() -> None:
    context = judge_step(run_of(2, 2), 0, "global-token-mean", "given").context
    assert not {"ranks_per_exchange", "exchange_groups", "ranks_per_batch"} & context.quantities.keys()


@pytest.mark.parametrize(("tp", "expected"), [(2, 4.0), (1, None)])
def test_axes_that_share_each_batch_together_are_one_degree(tp: int, expected: float | None) -> None:
    """A count over the world has each token pp * tp times, which no single axis is."""
    run = World(Trainer(root=global_mean(), data_ranks=4, stages=2)).run()
    for trace in run.ranks.values():
        trace.header.axes = {"dp_replicate": 4 // tp, "tp": tp, "pp": 2}
        trace.header.same_data = ((0, 1, 4, 5), (2, 3, 6, 7)) if tp > 1 else ((0, 4), (1, 5), (2, 6), (3, 7))
    context = judge_step(run, 0, "global-token-mean", "given").context
    assert context.quantities.get("ranks_per_batch") == expected


@pytest.mark.parametrize(("unscaling", "left"), [((), 64.0), ((1,), 64.0), ((0, 1), None)])
def test_a_scale_that_another_rank_put_in_is_known_where_one_left_it(
    unscaling: tuple[int, ...], left: float | None
) -> None:
    """The last stage of a pipeline scales, and each stage is to unscale."""
    run = World(Trainer(root=global_mean(), op="sum", data_ranks=2)).run()
    for rank, trace in run.ranks.items():
        told: list[AmpScale | AmpUnscale] = [AmpScale(seq=1_000_000, t_ns=0, step=0, scale=64.0)] if rank else []
        if rank in unscaling:
            told.append(AmpUnscale(seq=1_000_001, t_ns=0, step=0, scale=64.0, params=0))
        trace.events.extend(told)
    context = judge_step(run, 0, "global-token-mean", "given").context
    assert context.quantities.get("loss_scale") == left

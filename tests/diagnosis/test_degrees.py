"""Degrees that no reduction names: of ranks that exchange activations."""

from __future__ import annotations

from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.events import Exchange
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

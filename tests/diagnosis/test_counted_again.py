"""A reduction over all ranks, some of which evaluate one batch together: what they bring is one gradient twice."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from random_trainers import global_mean
from simulator import Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss, Reduce

SHARDS = "layers.0.weight"
COPY = {"embed.weight": 1, SHARDS: 2, "norm.weight": 3}


def of_two_batches(key: Key, tokens: dict[Key, int]) -> float:
    return 2 / sum(tokens.values())


def judged(*, shards: bool) -> Report:
    """Ranks 0, 1 and 2, 3 share a batch each (tp = 2). `shards`: 0, 2 and 1, 3 hold different values of a parameter."""
    world = World(Trainer(root=of_two_batches, op="sum", data_ranks=4))
    for (rank, k, m), row in zip(world.trainer.keys, range(4), strict=True):
        world.num_tokens[rank, k, m] = world.num_tokens[rank - rank % 2, k, m]
        for gradients in world.token_gradients.values():
            gradients[row] = gradients[row - row % 2]
    run = world.run()
    for rank, trace in run.ranks.items():
        labels = [event.label_hash for event in run.ranks[rank - rank % 2].events if isinstance(event, Loss)]
        trace.events = [
            msgspec.structs.replace(event, label_hash=labels[0])
            if isinstance(event, Loss)
            else msgspec.structs.replace(event, impl="all_reduce")
            if isinstance(event, Reduce)
            else event
            for event in trace.events
        ]
        for name, id in world.ranks[rank].ids.items():
            seed = COPY[name] + (10 * (rank % 2) if shards and name == SHARDS else 0)
            values = np.random.default_rng(seed).normal(size=16).astype(np.float32)
            trace.param_values |= {(id, False): values, (id, True): values}
    return diagnose(run)


def test_what_ranks_of_one_batch_bring_twice_is_named_by_how_many_they_are() -> None:
    (finding,) = judged(shards=False).findings
    assert (finding.code, finding.factor.expression) == ("GS000", "ranks_per_batch")
    assert "Its group holds 2 ranks of each batch" in finding.explanation


def test_shards_that_are_mixed_and_copies_that_are_counted_twice_are_one_reduction_too_wide() -> None:
    (finding,) = judged(shards=True).findings
    assert (finding.code, finding.num_parameters) == ("GS105", 1)
    assert "counted 2 times" in finding.explanation


@pytest.mark.parametrize(("passes", "reduction", "told"), [(2, "sum", True), (3, "sum", True), (2, "mean", False)])
def test_tokens_that_ranks_of_one_sequence_all_count_are_told_where_the_program_counts(
    passes: int, reduction: str, told: bool
) -> None:
    """Four ranks, two of which hold parts of one sequence and count all of its tokens (prime-rl's review of #2562)."""
    root = global_mean(4 / 2)  # times the ranks over which the reduction averages
    report = diagnose(World(Trainer(root=root, data_ranks=4, accumulation=passes, reduction=reduction)).run())
    (finding,) = report.findings
    assert (finding.code, finding.factor.exact) == ("GS303", "1/2")
    assert ("2 ranks that share sequences" in finding.fix) == told

"""Ranks whose labels are the same numbers in every batch are not taken for ranks that share their tokens."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from random_trainers import global_mean
from simulator import Hand, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.events import Loss, Reduce
from gradcheck_dist.trace.run import Run

TRAINER = Trainer(root=global_mean(), op="sum", data_ranks=2)


def contrastive(trainer: Trainer = TRAINER, *, copies: bool = True) -> Run:
    """All labels are zeros, gradients are summed by hand, and each rank holds a copy of the model, or shards of it."""
    world = World(trainer, 1)
    run = world.run()
    for rank, trace in run.ranks.items():
        trace.events = [
            msgspec.structs.replace(event, label_hash=7)
            if isinstance(event, Loss)
            else msgspec.structs.replace(event, impl="all_reduce")
            if isinstance(event, Reduce)
            else event
            for event in trace.events
        ]
        for name, id in world.ranks[rank].ids.items():
            seed = (0 if copies else rank, len(name))
            trace.param_values[id, False] = np.random.default_rng(seed).normal(size=16).astype(np.float32)
    return run


def test_copies_that_compute_other_gradients_have_batches_of_their_own() -> None:
    report = diagnose(contrastive())
    assert (report.run.data_ranks, report.verdict) == ([[0], [1]], "clean")
    assert "different gradients with copies of one model" in report.run.data_ranks_from


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_fault_is_found_between_them(factor: float) -> None:
    (finding,) = diagnose(contrastive(replace(TRAINER, hands=(Hand("before_optimizer", factor),)))).findings
    assert finding.factor.observed == pytest.approx(factor)


def test_shards_share_the_tokens_that_their_labels_name() -> None:
    assert diagnose(contrastive(copies=False)).run.data_ranks == [[0, 1]]

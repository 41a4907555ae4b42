"""A weight that is small and well measured is a weight: what rescaling left of the first accumulation steps."""

from __future__ import annotations

from random_trainers import global_mean
from simulator import Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose


def test_many_accumulation_steps_are_rescaled_by_one_cause() -> None:
    trainer = Trainer(
        root=global_mean(4), impl="none", data_ranks=1, stages=2, accumulation=10, microbatches=4, scale_grads=True
    )
    assert [finding.code for finding in diagnose(World(trainer, 3).run()).findings] == ["GS201"]


def test_a_loss_that_only_keeps_a_graph_alive_is_judged_beside_a_missing_reduction() -> None:
    def root(key: Key, tokens: dict[Key, int]) -> float:
        return float((1e-11 if key[0] == 1 else 1.0) * 2 / sum(tokens.values()))

    trainer = Trainer(root=root, accumulation=2, not_reduced=frozenset({"norm.weight"}))
    assert [finding.code for finding in diagnose(World(trainer, 3).run()).findings] == ["GS103", "GS000"]

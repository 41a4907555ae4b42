"""Faults that noise hides in each weight alone: told from all weights together, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean, microbatch_mean
from simulator import Hand, Trainer, World
from trainer_families import make_case

from gradcheck_dist.diagnosis.engine import diagnose

NOISY = Trainer(root=global_mean(), op="sum", impl="fsdp", data_ranks=2, accumulation=8, microbatches=4, stages=2,
                sync="every", dtype="bfloat16", loss_dtype="bfloat16", tokens=(20, 23),
                params=(("layers.0.weight", 128), ("norm.weight", 64)))  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_means_below_the_noise_of_each_weight_are_seen_in_all_of_them(seed: int) -> None:
    report = diagnose(World(replace(NOISY, root=microbatch_mean()), seed).run())
    assert [finding.code for finding in report.findings] == ["GS301"]
    assert report.tolerance is not None and report.tolerance > 0.1
    assert diagnose(World(NOISY, seed).run()).findings == []


@pytest.mark.parametrize("seed", [1034, 500013])  # of the second a loss in bfloat16 rounds the departure itself
def test_a_rank_mean_below_the_noise_is_seen(seed: int) -> None:
    case = make_case("mean-of-rank-means", seed)
    report = diagnose(World(case.trainer, seed).run())
    assert [finding.code for finding in report.findings] == ["GS302"]


def test_noisy_weights_between_two_faults_do_not_change_their_shape() -> None:
    trainer = Trainer(root=global_mean(), impl="fsdp", data_ranks=3, accumulation=5, sync="every", dtype="bfloat16",
                      params=(("layers.0.weight", 128), ("norm.weight", 64)),
                      hands=(Hand("before_optimizer", 2.6),))  # fmt: skip
    for seed in range(4):
        findings = diagnose(World(trainer, seed).run()).findings
        assert [finding.code for finding in findings] == ["GS101", "GS000"]
        assert findings[1].factor.observed == pytest.approx(2.6, rel=0.02)

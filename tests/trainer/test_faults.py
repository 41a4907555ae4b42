"""Every fault gives the gradient that its story predicts, or leaves it right and breaks only what it says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from trainer_checks import (
    SIZES,
    TOLERANCE_TP,
    Key,
    assert_same,
    contributions,
    control,
    distance,
    norm_of,
    plan,
    run,
    scaled,
    small,
    total_tokens,
    weighted,
)
from trainer_workers import Gradients

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.data import DataLoader
from gradcheck_dist.trainer.faults import fault_names
from gradcheck_dist.trainer.result import TrainResult

pytestmark = [pytest.mark.slow, pytest.mark.long]

K, M = 3, 4
DDP: dict[str, Any] = {"dp_replicate": 2, "accum": K}
FSDP: dict[str, Any] = {"dp_shard": 2, "accum": K}
HSDP: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 2, "accum": 2}
PIPELINE: dict[str, Any] = {"pp": 2, "microbatches": M, "accum": K}
EP: dict[str, Any] = {"dp_shard": 2, "ep": 2, "num_experts": 4, "gradient_reduction": "average"}
AVERAGE: dict[str, Any] = {"gradient_reduction": "average"}

Weigh = Callable[[TrainConfig, Key, int], float]
"""The relative weight of a contribution on a data-parallel rank."""


def own(key: Key, rank: int) -> float:
    return 1.0 if key[0] == rank else 0.0


def rank_means(config: TrainConfig, key: Key, rank: int) -> float:
    parts = contributions(config)
    tokens = sum(count for other, (count, _) in parts.items() if other[0] == key[0])
    return total_tokens(config) / (config.axes.data_parallel_degree * tokens)


def microbatch_means(config: TrainConfig, key: Key, rank: int) -> float:
    return total_tokens(config) / (len(contributions(config)) * contributions(config)[key][0])


WEIGHTS: dict[str, tuple[dict[str, Any], Weigh]] = {
    "ddp-averages": (DDP, lambda c, key, rank: 1 / 2),
    "ddp-averages in FSDP2": (FSDP, lambda c, key, rank: 1 / 2),
    "ddp-averages in HSDP": (HSDP, lambda c, key, rank: 1 / 4),
    "hsdp-replicate-averages": (HSDP, lambda c, key, rank: 1 / 2),
    "hsdp-replica-not-reduced": (HSDP, lambda c, key, rank: float(key[0] // 2 == rank // 2)),
    "cp-averages": ({"cp": 2, "accum": 2}, lambda c, key, rank: 1 / 2),
    "cp-loss-scaling": ({"cp": 2, "accum": 2}, lambda c, key, rank: 2),
    "model-axes-in-loss-scale": ({"dp_shard": 2, "tp": 2, **AVERAGE}, lambda c, key, rank: 2),
    "manual-optimization-no-sync": (DDP, lambda c, key, rank: own(key, rank)),
    "explicit-plus-ddp-reduce": (DDP, lambda c, key, rank: 2),
    "sync-every-backward": (DDP, lambda c, key, rank: 2 ** (K - 1 - key[1])),
    "no-sync-inverted": (DDP, lambda c, key, rank: 2 ** (K - 2 - key[1]) if key[1] < K - 1 else own(key, rank)),
    "no-sync-inverted in FSDP2": (FSDP, lambda c, key, rank: float(key[1] < K - 1)),
    "sync-flag-between-forward-and-backward": (DDP, lambda c, key, rank: own(key, rank) if key[1] else 1),
    "zero-grad-inside-accumulation": (DDP, lambda c, key, rank: float(key[1] == K - 1)),
    "running-total": (DDP, lambda c, key, rank: K - key[1]),
    "fused-loss": (DDP, lambda c, key, rank: 1),
    "fused-loss-gradient-passed-by": (DDP, lambda c, key, rank: total_tokens(c)),
    "keeps-the-last-pass": (DDP, lambda c, key, rank: float(key[1] == K - 1)),
    "schedule-scales-grads in GPipe": ({**PIPELINE, "schedule": "gpipe"}, lambda c, key, rank: M ** (key[1] + 1.0 - K)),
    "schedule-scales-grads in ZBV": ({**PIPELINE, "schedule": "zbv"}, lambda c, key, rank: M ** (key[1] + 1.0 - K)),
    "double-accumulation-division": (PIPELINE, lambda c, key, rank: 1 / (K * M)),
    "accumulation-not-divided": (DDP, lambda c, key, rank: K),
    "loss-divided-after-backward": (PIPELINE, lambda c, key, rank: total_tokens(c)),
    "rank-means": ({**DDP, **AVERAGE}, rank_means),
    "microbatch-means": ({**DDP, **AVERAGE}, microbatch_means),
    "rl-denominator": ({**DDP, **AVERAGE}, lambda c, key, rank: total_tokens(c) / (2 * contributions(c)[key][0])),
    "padding-counts-as-tokens": (
        {**DDP, **AVERAGE},
        lambda c, key, rank: total_tokens(c) / (c.sequences_per_step * c.seq_len),
    ),
    "hsdp-divide-factor-differs": ({"dp_replicate": 2, "dp_shard": 2, "accum": K, **AVERAGE}, lambda c, key, rank: 2),
    "bf16-loss-scale": (DDP, lambda c, key, rank: 1 / 65536),
    "pipeline-infers-shapes-in-ddp": (
        {"dp_replicate": 2, "pp": 2, "microbatches": M},
        lambda c, key, rank: 1 if key[2] else 2,
    ),
    "pipeline-ignores-no-sync": (
        {"dp_replicate": 2, "pp": 2, "microbatches": M, "accum": K},
        lambda c, key, rank: 2 ** (K - 1 - key[1]),
    ),
    "same-batch-on-every-rank": (
        DDP,
        lambda c, key, rank: (
            0
            if key[0]
            else total_tokens(c) / sum(tokens for other, (tokens, _) in contributions(c).items() if not other[0])
        ),
    ),
}
OTHERS = (
    *("fsdp-one-unit-averages", "param-ignored-by-ddp", "ep-fsdp-divide-mismatch", "expert-group-wrong"),
    *("ddp-group-excludes-cp", "sp-norm-partial", "tied-embedding-across-pp", "aux-loss-not-scaled"),
    *("contrastive-all-gather", "clip-by-hand", "clip-by-hand-local", "clip-per-group-norm"),
    *("moe-router-missing-tp-reduce", "mtp-loss-units", "mtp-other-token-count"),
    *("zero-bubble-reshards", "zero-bubble-in-ddp", "fsdp-divides-twice-over-one-rank"),
    *("clip-norm-pp-local", "clip-norm-fsdp-local", "clip-skipped", "clip-before-unscale"),
    *("reported-norm-wrong", "validation-scale", "ac-without-rng-state"),
    *("found-inf-not-shared", "overflow-in-first-stage", "scaled-in-flight"),
    *("unscaled-twice", "input-gradients-add-up", "tie-broken-by-tp"),
    *("gathered-before-step", "learning-rate-by-rank", "gradients-not-emptied"),
)
"""Faults with a test of their own below."""


JOBS = {case: plan(small(**values, faults=[case.split()[0]])) for case, (values, _) in WEIGHTS.items()}

IN_FLIGHT = plan(small(**PIPELINE, faults=["scaled-in-flight"]))
ADDED_UP = plan(small(**PIPELINE, faults=["input-gradients-add-up"]))


def faulty(name: str, **values: Any) -> tuple[list[Gradients], list[TrainResult]]:
    return run(small(**values, faults=[name]))


def data_rank(config: TrainConfig, rank: int) -> int:
    position = config.axes.coordinates(rank)
    return position["dp_replicate"] * config.axes.dp_shard + position["dp_shard"]


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_fault_weighs_contributions_as_its_story_says(case: str) -> None:
    values, weigh = WEIGHTS[case]
    config = small(**values)
    gradients, _ = run(JOBS[case])
    for rank, grads in enumerate(gradients):
        relative = {key: weigh(config, key, data_rank(config, rank)) for key in contributions(config)}
        assert_same(grads, weighted(config, relative), TOLERANCE_TP if config.axes.tp > 1 else 1e-6)


def test_every_fault_is_under_test() -> None:
    assert sorted({case.split()[0] for case in WEIGHTS} | set(OTHERS)) == fault_names()


def test_what_the_last_stage_divides_before_it_sends_it_is_missing_in_the_earlier_one_alone() -> None:
    (first, last), _ = run(IN_FLIGHT)
    expected = control(small(**PIPELINE))[0]
    assert_same(first, {name: expected[name] / 2 for name in first})
    assert_same(last, {name: expected[name] for name in last})


def test_what_the_last_stage_hands_back_again_changes_the_earlier_one_alone() -> None:
    (first, last), _ = run(ADDED_UP)
    expected = control(small(**PIPELINE))[0]
    assert_same(last, {name: expected[name] for name in last})
    assert all(not np.allclose(first[name], expected[name], rtol=0.1) for name in first)


def test_a_scale_that_is_taken_out_twice_is_in_the_gradient_as_its_inverse() -> None:
    from gradcheck_dist.trainer.faults_field import unscale_the_wrapper

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(parameter.sum()).backward()
    unscale_the_wrapper(scaler, optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 1 - 1 / 1024))


def test_one_forgotten_unit_is_averaged_alone() -> None:
    expected = scaled(weighted(small(**FSDP)), lambda name: 1 / 2 if name.startswith("layers.0.") else 1)
    for grads in faulty("fsdp-one-unit-averages", **FSDP)[0]:
        assert_same(grads, expected)


def test_one_ignored_parameter_keeps_its_own_ranks_tokens_alone() -> None:
    config = small(**DDP)
    for rank, grads in enumerate(faulty("param-ignored-by-ddp", **DDP)[0]):
        alone = weighted(config, {key: own(key, rank) for key in contributions(config)})
        name = "layers.0.attention.wq.weight"
        assert_same(grads, weighted(config) | {name: alone[name]})


@pytest.mark.parametrize(("name", "factor"), [("ep-fsdp-divide-mismatch", 2), ("expert-group-wrong", 1 / 2)])
def test_experts_alone_are_divided_by_another_number(name: str, factor: float) -> None:
    for layout in (EP, EP | {"dp_shard": 4}):
        expected = scaled(control(small(**layout))[0], lambda parameter: factor if ".experts." in parameter else 1)
        for grads in faulty(name, **layout)[0]:
            assert_same(grads, expected)


def test_fsdp_divides_a_forced_sum_twice_over_one_rank() -> None:
    expected = scaled(control(small(**EP))[0], lambda parameter: 1 / 2 if ".experts." in parameter else 1)
    for grads in faulty("fsdp-divides-twice-over-one-rank", **EP)[0]:
        assert_same(grads, expected)


def test_resharding_under_a_zero_bubble_schedule_loses_gradients() -> None:
    layout = {**PIPELINE, "dp_shard": 2, "schedule": "zbv", "accum": 1}
    expected = control(small(**layout))[0]
    gradients, _ = faulty("zero-bubble-reshards", **layout)
    found = {name: distance(grad, expected[name]) for grads in gradients for name, grad in grads.items()}
    assert found.keys() != expected.keys() or max(found.values()) > 1e-2


def test_ddp_leaves_stages_of_a_zero_bubble_schedule_unreduced() -> None:
    layout = {**PIPELINE, **AVERAGE, "dp_replicate": 2, "replication": "composable", "schedule": "zbv", "accum": 1}
    expected = control(small(**layout))[0]
    gradients, _ = faulty("zero-bubble-in-ddp", **layout)
    found = {name: distance(grad, expected[name]) for grads in gradients for name, grad in grads.items()}
    assert max(found.values()) > 0.1


def test_ranks_of_cp_that_are_not_reduced_add_up_to_the_right_gradient() -> None:
    layout = {"dp_shard": 2, "cp": 2}
    gradients, _ = faulty("ddp-group-excludes-cp", **layout)
    expected = control(small(**layout))[0]
    assert_same({name: gradients[0][name] + gradients[1][name] for name in expected}, expected)
    assert distance(gradients[0]["head.weight"], expected["head.weight"]) > 0.1


def test_norms_of_tp_ranks_that_are_not_summed_add_up_to_the_right_gradient() -> None:
    layout = {"tp": 2, "sequence_parallel": True}
    gradients, _ = faulty("sp-norm-partial", **layout)
    expected = control(small(**layout))[0]
    for name, right in expected.items():
        if "norm" in name:
            assert distance(gradients[0][name] + gradients[1][name], right) < TOLERANCE_TP
            assert distance(gradients[0][name], right) > 0.1
        else:
            assert distance(gradients[0][name], right) < TOLERANCE_TP


def test_routers_of_tp_ranks_that_are_not_summed_add_up_to_the_right_gradient() -> None:
    layout = {"tp": 2, "num_experts": 4, "accum": 2, "aux_loss_weight": 1.0}
    gradients, _ = faulty("moe-router-missing-tp-reduce", **layout)
    expected = control(small(**layout))[0]
    for name, right in expected.items():
        if "router" in name:
            assert distance(gradients[0][name] + gradients[1][name], right) < TOLERANCE_TP
            assert distance(gradients[0][name], right) > 0.1
        else:
            assert distance(gradients[0][name], right) < TOLERANCE_TP


@pytest.mark.parametrize("name", ["mtp-loss-units", "mtp-other-token-count"])
def test_the_further_heads_part_alone_is_in_other_units(name: str) -> None:
    layout = {"dp_shard": 2, "accum": 3, "num_mtp_heads": 1, "mtp_loss_weight": 1.0}
    config = small(**layout)
    right = control(config)[0]
    main = control(small(**layout | {"mtp_loss_weight": 0.0}))[0]
    batches = [batch for rank in range(2) for batch in DataLoader(config).step_batches(0, rank)]
    tokens = np.array([batch.tokens_by_head for batch in batches]).sum(0)
    factor = 3 if name == "mtp-loss-units" else tokens[1] / tokens[0]
    expected = {key: main[key] + factor * (right[key] - main[key]) for key in right}
    for grads in faulty(name, **layout)[0]:
        assert_same(grads, expected, 2e-6)


def test_features_that_are_gathered_without_a_gradient_lose_what_other_ranks_want() -> None:
    layout = {"dp_replicate": 2, "contrastive_loss_weight": 1.0}
    whole = small(batch_size=2, contrastive_loss_weight=1.0)
    expected = run(whole)[0][0]
    for grads in run(small(**layout))[0]:
        assert_same(grads, expected)
    for grads in faulty("contrastive-all-gather", **layout)[0]:
        assert distance(grads["head.weight"], expected["head.weight"]) < 1e-6
        assert distance(grads["layers.0.attention.wo.weight"], expected["layers.0.attention.wo.weight"]) > 1e-2


def test_tied_copies_that_are_not_summed_add_up_to_the_right_gradient() -> None:
    layout = {**PIPELINE, "tied_embeddings": True}
    first, last = faulty("tied-embedding-across-pp", **layout)[0]
    expected = control(small(**layout))[0]
    copies = first.pop("embedding.weight"), last.pop("head.weight")
    assert distance(copies[0] + copies[1], expected["embedding.weight"]) < 1e-6
    assert min(distance(copy, expected["embedding.weight"]) for copy in copies) > 0.1
    assert_same(first, expected)
    assert_same(last, expected)


def test_what_is_gathered_before_the_step_computes_with_what_was_there_before_it() -> None:
    layout = {"dp_shard": 2, "accum": 1, "steps": 2}
    (first, late), (_, right), (_, still) = (
        [step.loss for step in results[0].steps]
        for results in (
            faulty("gathered-before-step", **layout, lr=0.1)[1],
            run(small(**layout, lr=0.1))[1],
            run(small(**layout, lr=1e-12))[1],
        )
    )
    assert late == pytest.approx(still, rel=1e-5)
    assert late != pytest.approx(right, rel=1e-2)
    assert first > 0


def test_a_learning_rate_of_its_own_takes_each_rank_to_another_model() -> None:
    layout = {**DDP, "steps": 2, "lr": 0.1, "optimizer": "sgd"}
    (gradients, results), (right, plain) = faulty("learning-rate-by-rank", **layout), run(small(**layout))
    for of_rank in gradients:  # in the first step
        assert_same(of_rank, right[0])
    assert results[0].steps[0].loss == plain[0].steps[0].loss
    assert results[0].steps[1].loss != pytest.approx(plain[0].steps[1].loss, rel=1e-3)


@pytest.mark.parametrize(("layout", "times"), [(DDP, 2), ({"dp_shard": 2}, 1), ({"tp": 2}, 1)], ids=str)
def test_gradients_that_are_not_emptied_are_a_part_of_the_next_steps(layout: dict[str, Any], times: int) -> None:
    """DDP sums what is left over the ranks once more."""
    two = {**layout, "steps": 2, "lr": 1e-12, "optimizer": "sgd"}
    (gradients, faulted), (right, plain) = faulty("gradients-not-emptied", **two), run(small(**two))
    for of_rank, expected in zip(gradients, right, strict=True):  # in the first step
        assert_same(of_rank, expected)
    (first, second), (_, alone) = ([step.grad_norm for step in results[0].steps] for results in (faulted, plain))
    assert times * first + alone >= second > 1.1 * max(times * first, alone)


def test_copies_that_tensor_parallelism_unties_add_up_to_the_right_gradient() -> None:
    layout = {"tp": 2, "accum": 2, "tied_embeddings": True}
    expected = control(small(**layout))[0]
    for grads in faulty("tie-broken-by-tp", **layout)[0]:
        copies = grads.pop("embedding.weight"), grads.pop("head.weight")
        assert distance(copies[0] + copies[1], expected["embedding.weight"]) < TOLERANCE_TP
        assert min(distance(copy, expected["embedding.weight"]) for copy in copies) > 0.1
        assert_same(grads, expected, TOLERANCE_TP)


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "accum": 3}, {"pp": 2, "microbatches": 3}], ids=str)
def test_the_auxiliary_part_alone_is_multiplied_by_the_number_of_microbatches(layout: dict[str, Any]) -> None:
    config = small(**layout, num_experts=4, aux_loss_weight=1.0)
    right = control(config)[0]
    main = control(small(**layout, num_experts=4, aux_loss_weight=0.0, z_loss_weight=0.0))[0]
    expected = {name: main[name] + 3 * (right[name] - main[name]) for name in right}
    for grads in faulty("aux-loss-not-scaled", **layout, num_experts=4, aux_loss_weight=1.0)[0]:
        assert_same(grads, expected, 2e-6)


def test_stages_that_clip_alone_get_coefficients_of_their_own() -> None:
    right = control(small(**PIPELINE))[0]
    for grads in faulty("clip-norm-pp-local", **PIPELINE, max_norm=0.1)[0]:
        part = {name: right[name] for name in grads}
        assert_same(grads, scaled(part, 0.1 / (norm_of(part) + 1e-6)), 2e-6)
        assert norm_of(grads) == pytest.approx(0.1, rel=1e-4)


def test_shards_that_clip_alone_make_another_norm_than_max_norm() -> None:
    right = control(small(**FSDP))[0]
    gradients, results = faulty("clip-norm-fsdp-local", **FSDP, max_norm=0.1)
    norms = [result.steps[0].grad_norm for result in results]
    assert np.sqrt(sum(norm**2 for norm in norms)) == pytest.approx(norm_of(right), rel=1e-5)
    assert norm_of(gradients[0]) == pytest.approx(0.1 * 2**0.5, rel=1e-4)


def test_a_clip_by_hand_scales_as_torchs_does_and_a_local_one_by_each_ranks_own_norm() -> None:
    right = control(small(**FSDP))[0]
    for grads in faulty("clip-by-hand", **FSDP, max_norm=0.1)[0]:
        assert_same(grads, scaled(right, 0.1 / norm_of(right)), 2e-6)
    gradients, results = faulty("clip-by-hand-local", **FSDP, max_norm=0.1)
    norms = [result.steps[0].grad_norm for result in results]
    assert np.sqrt(sum(norm**2 for norm in norms)) == pytest.approx(norm_of(right), rel=1e-5)
    assert norm_of(gradients[0]) == pytest.approx(0.1 * 2**0.5, rel=1e-4)


def test_ranks_with_other_experts_clip_by_other_norms() -> None:
    right = control(small(**EP))[0]
    results = faulty("clip-per-group-norm", **EP, max_norm=0.1)[1]
    norms = [result.steps[0].grad_norm for result in results]
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)
    assert max(norms) < norm_of(right)


def test_a_skipped_clip_leaves_gradients_above_max_norm() -> None:
    gradients, results = faulty("clip-skipped", **DDP, max_norm=0.1)
    assert_same(gradients[0], control(small(**DDP))[0])
    assert results[0].steps[0].grad_norm > 0.1


def test_clipping_scaled_gradients_clips_to_a_fraction_of_max_norm() -> None:
    values = {"mixed_precision": "float16", "max_norm": 1.0}
    gradients, _ = faulty("clip-before-unscale", **values)
    assert norm_of(gradients[0]) == pytest.approx(1.0 / 65536, rel=1e-2)
    assert norm_of(run(small(**values))[0][0]) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "field", "factor"), [("reported-norm-wrong", "grad_norm", 2**0.5), ("validation-scale", "loss", 1 / K)]
)
def test_a_wrong_log_leaves_the_training_alone(name: str, field: str, factor: float) -> None:
    right, wrong = run(small(**DDP))[1][0], faulty(name, **DDP)[1][0]
    assert wrong.checksum == right.checksum
    assert getattr(wrong.steps[0], field) == pytest.approx(factor * getattr(right.steps[0], field))


def test_dropout_that_is_recomputed_with_other_numbers_scatters_gradients() -> None:
    values = {"dropout": 0.2, "activation_checkpointing": "full"}
    right, wrong = run(small(**values))[0][0], faulty("ac-without-rng-state", **values)[0][0]
    ratios = [wrong[name] / right[name] for name in right if name != "embedding.weight"]
    assert all(ratio.std() > 0.01 for ratio in ratios[:3])


@pytest.mark.parametrize("fault", ["ddp-averages", "sync-every-backward", "rank-means"])
def test_the_logged_loss_does_not_show_a_gradient_bug(fault: str) -> None:
    values = {**DDP, **AVERAGE}
    assert SIZES["optimizer"] == "sgd"
    assert faulty(fault, **values)[1][0].steps[0].loss == pytest.approx(
        run(small(**values))[1][0].steps[0].loss, rel=1e-6
    )


def test_an_overflow_of_the_first_stage_is_its_own_alone() -> None:
    import torch

    from gradcheck_dist.trainer.faults_update import overflow_in_first_stage, unscale_alone

    found = []
    for name in ("embedding", "head"):
        stage = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)})
        optimizer, scaler = torch.optim.SGD(stage.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
        scaler.scale(stage[name](torch.ones(2)).sum()).backward()
        overflow_in_first_stage(stage, small())
        unscale_alone(scaler, optimizer)
        found += [
            float(value) for value in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        ]
    assert found == [1.0, 0.0]

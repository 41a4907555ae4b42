"""Every axis, alone and with others, gives the gradient, the norm and the loss of one process on the same sequences."""

from typing import Any

import numpy as np
import pytest
from trainer_checks import TOLERANCE, TOLERANCE_TP, assert_same, control, distance, norm_of, plan, run, small

pytestmark = [pytest.mark.slow, pytest.mark.long]

PIPELINE: dict[str, Any] = {"pp": 2, "microbatches": 4, "accum": 2}
AVERAGE: dict[str, Any] = {"gradient_reduction": "average"}
MOE: dict[str, Any] = {"num_experts": 4, "accum": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "HSDP": {"dp_replicate": 2, "dp_shard": 2, "accum": 3},
    "HSDP average": {"dp_replicate": 2, "dp_shard": 2, "accum": 3, **AVERAGE},
    "FSDP1": {"dp_shard": 2, "accum": 3, "sharding": "fsdp1", **AVERAGE},
    "composable replicate": {"dp_replicate": 2, "replication": "composable", "accum": 3},
    "DDP and 1F1B, average": {"dp_replicate": 2, **PIPELINE, **AVERAGE},
    "DDP and GPipe": {"dp_replicate": 2, "schedule": "gpipe", **PIPELINE, "accum": 1},
    "DDP and 1F1B": {"dp_replicate": 2, **PIPELINE},
    "DDP and TP": {"dp_replicate": 2, "tp": 2, "accum": 2, "sequence_parallel": True},
    "Interleaved1F1B": {"schedule": "interleaved1f1b", **PIPELINE},
    "LoopedBFS": {"schedule": "loopedbfs", **PIPELINE},
    "InterleavedZeroBubble and experts": {"schedule": "interleavedzerobubble", **PIPELINE, "num_experts": 4},
    "DualPipeV": {"schedule": "dualpipev", **PIPELINE},
    "DDP and Interleaved1F1B": {"dp_replicate": 2, "schedule": "interleaved1f1b", **PIPELINE},
    "DDP and LoopedBFS, average": {"dp_replicate": 2, "schedule": "loopedbfs", **PIPELINE, **AVERAGE},
    "full checkpointing and ZBV": {"schedule": "zbv", **PIPELINE, "activation_checkpointing": "full"},
    "loss parallel and 1F1B": {"tp": 2, "loss_parallel": True, **PIPELINE},
    "compiled blocks, checkpointed and sharded": {
        "dp_shard": 2,
        "compile": "aot_eager",
        "activation_checkpointing": "full",
        "checkpoint_determinism": "none",
        "deterministic": "on",
    },
    "FSDP2 and ZBV": {"dp_shard": 2, "schedule": "zbv", **PIPELINE},
    "TP": {"tp": 2, "accum": 2},
    "TP, sequence and loss parallel": {"tp": 2, "accum": 2, "sequence_parallel": True, "loss_parallel": True},
    "FSDP2 and TP": {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "loss_parallel": True, "accum": 2},
    "TP and Interleaved1F1B": {"tp": 2, "sequence_parallel": True, "schedule": "interleaved1f1b", **PIPELINE},
    "CP": {"cp": 2, "accum": 2},
    "FSDP2 and CP, average": {"dp_shard": 2, "cp": 2, "accum": 2, **AVERAGE},
    "experts in FSDP2": {"dp_shard": 2, **MOE},
    "EP": {"dp_shard": 2, "ep": 2, **MOE},
    "EP average": {"dp_shard": 2, "ep": 2, **MOE, **AVERAGE},
    "EP in FSDP2, average": {"dp_shard": 4, "ep": 2, **MOE, **AVERAGE},
    "EP over CP, balanced": {"cp": 2, "ep": 2, **MOE, "balanced_routing": True},
    "experts and TP": {"tp": 2, **MOE},
    "experts, TP and FSDP2": {"tp": 2, "dp_shard": 2, "sequence_parallel": True, **MOE},
    "EP and TP": {"dp_shard": 2, "tp": 2, "ep": 2, "sequence_parallel": True, **MOE},
    "further heads": {"dp_shard": 2, "accum": 2, "num_mtp_heads": 2},
    "further heads and 1F1B": {**PIPELINE, "num_mtp_heads": 1},
    "further heads and CP": {"cp": 2, "accum": 2, "num_mtp_heads": 1},
    "further heads, loss parallel": {"tp": 2, "accum": 2, "num_mtp_heads": 1, "loss_parallel": True},
    "tied embeddings": {"dp_shard": 2, "accum": 2, "tied_embeddings": True},
    "tied embeddings and TP": {"tp": 2, "accum": 2, "tied_embeddings": True},
    "tied embeddings and 1F1B": {**PIPELINE, "tied_embeddings": True},
    "tied embeddings, FSDP2 and ZBV": {"dp_shard": 2, "schedule": "zbv", **PIPELINE, "tied_embeddings": True},
    "full checkpointing, CP and EP": {"cp": 2, "ep": 2, **MOE, "activation_checkpointing": "full"},
    "selective checkpointing and 1F1B": {**PIPELINE, "activation_checkpointing": "selective"},
}


CONFIGS = {name: plan(small(**values)) for name, values in LAYOUTS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_axis_gives_the_gradient_of_one_process(layout: str) -> None:
    config = CONFIGS[layout]
    gradients, results = run(config)
    expected, plain = control(config)
    if config.tied_embeddings and config.axes.pp > 1:  # the last stage's copy
        expected = expected | {"head.weight": expected["embedding.weight"]}
    for grads in gradients:
        assert_same(grads, expected, TOLERANCE_TP if config.axes.tp > 1 else TOLERANCE)
    assert set().union(*gradients) == set(expected)
    for result in results:
        assert result.steps[0].grad_norm == pytest.approx(norm_of(control(config)[0]), rel=1e-6)
        assert result.steps[0].loss == pytest.approx(plain.steps[0].loss, rel=1e-6)
        assert result.steps[0].tokens == plain.steps[0].tokens


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 2, "ep": 2, "num_experts": 4},
        {"dp_shard": 2, "pp": 2, "microbatches": 2},
        {"tp": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_clipping_scales_every_gradient_by_the_same_coefficient(layout: dict[str, Any]) -> None:
    config = small(**layout, max_norm=0.25)
    expected, _ = control(small(**layout))
    coefficient = 0.25 / (norm_of(expected) + 1e-6)
    for grads in run(config)[0]:
        assert_same(grads, {name: coefficient * grad for name, grad in expected.items()}, 3e-6)


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        ({"mixed_precision": "float16"}, 1e-2),
        ({"mixed_precision": "float16", "dp_replicate": 2}, 1e-2),
        ({"mixed_precision": "float16", "dp_shard": 2, **PIPELINE}, 1e-2),
        ({"mixed_precision": "bfloat16", "dp_shard": 2}, 5e-2),
        ({"mixed_precision": "bfloat16", **PIPELINE}, 5e-2),
    ],
    ids=str,
)
def test_mixed_precision_stays_near_the_gradient_of_float32(layout: dict[str, Any], tolerance: float) -> None:
    config = small(**layout)
    for grads in run(config)[0]:
        assert_same(grads, control(config)[0], tolerance)


def test_recomputation_with_the_same_random_numbers_keeps_dropout_exact() -> None:
    values = {"dp_replicate": 2, "dropout": 0.2}
    plain = run(small(**values))[0]
    recomputed = run(small(**values, activation_checkpointing="full"))[0]
    assert all(np.array_equal(a[name], b[name]) for a, b in zip(plain, recomputed, strict=True) for name in a)
    assert np.linalg.norm(plain[0]["head.weight"] - control(small(dp_replicate=2))[0]["head.weight"]) > 1e-3


def test_dropout_draws_the_masks_of_one_process_on_copies_under_tp_and_keeps_them_in_a_split_backward() -> None:
    values: dict[str, Any] = {"dropout": 0.2, "accum": 2}
    plain = run(small(**values))[0][0]
    for grads in run(small(**values, tp=2))[0]:
        assert_same(grads, plain, TOLERANCE_TP)
    values |= {**PIPELINE, "schedule": "zbv"}
    kept, recomputed = (run(small(**values, activation_checkpointing=mode))[0] for mode in ("none", "full"))
    assert all(np.array_equal(a[name], b[name]) for a, b in zip(kept, recomputed, strict=True) for name in a)


def test_float8_layers_stay_near_the_gradient_of_float32() -> None:
    pytest.importorskip("torchao")
    expected = control(small(accum=2))[0]
    for layout in ({"accum": 2}, {"dp_shard": 2}):
        gradients, _ = run(small(**layout, float8=True))
        for grads in gradients:
            assert_same(grads, expected, 0.3)
        assert max(distance(gradients[0][name], expected[name]) for name in expected) > 1e-3


def test_float8_layers_that_are_split_over_tp_give_the_gradient_of_one_process_in_float8() -> None:
    pytest.importorskip("torchao")
    expected = run(small(float8=True, accum=2))[0][0]
    for grads in run(small(float8=True, accum=2, tp=2, sequence_parallel=True))[0]:
        assert_same(grads, expected, TOLERANCE_TP)


def test_every_layout_starts_from_the_same_seed_checkpoint(tmp_path: Any) -> None:
    folder = str(tmp_path / "seed")
    values = {"lr": 0.5, "num_experts": 4, "max_norm": 1.0}
    _, written = run(small(**values, dp_shard=2, ep=2, steps=2, save_checkpoint=folder))
    losses = [
        run(small(**values, **layout, seed_checkpoint=folder, seed=0))[1][0].steps[0].loss
        for layout in ({"accum": 2}, {"pp": 2, "microbatches": 2}, {"cp": 2, "ep": 2, "accum": 2})
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert losses[0] < written[0].steps[0].loss

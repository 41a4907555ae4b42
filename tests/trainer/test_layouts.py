"""Every layout gives the gradient of one process, and every fault the gradient that its story predicts."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from trainer_workers import Gradients

from gradcheck_dist.axes import Axes
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.data import DataLoader
from gradcheck_dist.trainer.launch import launch
from gradcheck_dist.trainer.model import build_model
from gradcheck_dist.trainer.result import TrainResult

pytestmark = pytest.mark.slow

K, M = 3, 2
SIZES: dict[str, Any] = {"seq_len": 32, "n_layers": 2, "dim": 32, "ffn_dim": 64, "max_norm": None}
DDP, FSDP, PIPELINE = Axes(dp_replicate=2), Axes(dp_shard=2), Axes(pp=2)
TOLERANCE = 1e-6  # relative to the norm of a parameter's gradient, float32


@lru_cache
def contributions(config: TrainConfig) -> dict[tuple[int, int, int], tuple[int, Gradients]]:
    """Tokens and gradient of the token-sum loss of each contribution (data rank, k, m), computed by one process."""
    model, loader = build_model(config), DataLoader(config)
    found = {}
    for rank in range(config.axes.data_parallel_degree):
        for k, batch in enumerate(loader.step_batches(0, rank)):
            parts = zip(batch.tokens.chunk(config.microbatches), batch.labels.chunk(config.microbatches), strict=True)
            for m, (tokens, labels) in enumerate(parts):
                model.zero_grad()
                F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum").backward()
                grads = {name: p.grad.double().numpy() for name, p in model.named_parameters() if p.grad is not None}
                found[rank, k, m] = int((labels >= 0).sum()), grads
    return found


def weighted(config: TrainConfig, relative: dict[tuple[int, int, int], float] | None = None) -> Gradients:
    """The sum of all contributions, each with weight relative / N."""
    parts = contributions(config)
    total = sum(tokens for tokens, _ in parts.values())
    weights = {key: (relative[key] if relative else 1.0) / total for key in parts}
    names = next(iter(parts.values()))[1]
    return {name: sum(weights[key] * grads[name] for key, (_, grads) in parts.items()) for name in names}


def run(config: TrainConfig) -> tuple[list[Gradients], list[TrainResult]]:
    pairs = launch("trainer_workers:step_gradients", (config,), config.axes.world_size, timeout_s=60)
    return [grads for grads, _ in pairs], [result for _, result in pairs]


def assert_same(measured: Gradients, expected: Gradients, tolerance: float = TOLERANCE) -> None:
    for name, value in measured.items():
        distance = np.linalg.norm(value - expected[name]) / np.linalg.norm(expected[name])
        assert distance < tolerance, f"{name} is off by {distance:.1e}"


LAYOUTS = {
    "one process": TrainConfig(accum=K, **SIZES),
    "DDP": TrainConfig(axes=DDP, accum=K, **SIZES),
    "DDP average": TrainConfig(axes=DDP, accum=K, gradient_reduction="average", **SIZES),
    "FSDP2": TrainConfig(axes=FSDP, accum=K, **SIZES),
    "FSDP2 average": TrainConfig(axes=FSDP, accum=K, gradient_reduction="average", **SIZES),
    "GPipe": TrainConfig(axes=PIPELINE, accum=K, microbatches=M, schedule="gpipe", **SIZES),
    "1F1B": TrainConfig(axes=PIPELINE, accum=K, microbatches=M, **SIZES),
    "GPipe that scales, no accumulation": TrainConfig(
        axes=PIPELINE, microbatches=4, schedule="gpipe", scale_grads=True, **SIZES
    ),
    "FSDP2 and 1F1B": TrainConfig(axes=Axes(dp_shard=2, pp=2), accum=2, microbatches=M, **SIZES),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_gradient_of_one_process(layout: str) -> None:
    config = LAYOUTS[layout]
    gradients, results = run(config)
    expected = weighted(config)
    for grads in gradients:
        assert_same(grads, expected)
    assert set().union(*gradients) == set(expected)
    norm = np.sqrt(sum((grad**2).sum() for grad in expected.values()))
    total = sum(tokens for tokens, _ in contributions(config).values())
    for result in results:
        assert result.steps[0].grad_norm == pytest.approx(norm, rel=1e-6)
        assert result.steps[0].tokens == total
        assert result.steps[0].loss == pytest.approx(results[0].steps[0].loss, rel=0)


def test_layouts_agree_on_the_loss_of_the_same_sequences() -> None:
    losses = [
        run(config)[1][0].steps[0].loss
        for config in (TrainConfig(accum=12, batch_size=1, **SIZES), LAYOUTS["DDP"], LAYOUTS["1F1B"])
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


Keys = dict[tuple[int, int, int], tuple[int, Gradients]]


def rank_means(parts: Keys) -> dict[tuple[int, int, int], float]:
    own = {rank: sum(tokens for (r, _, _), (tokens, _) in parts.items() if r == rank) for rank in (0, 1)}
    return {key: sum(own.values()) / (2 * own[key[0]]) for key in parts}


def microbatch_means(parts: Keys) -> dict[tuple[int, int, int], float]:
    total = sum(tokens for tokens, _ in parts.values())
    return {key: total / (2 * K * tokens) for key, (tokens, _) in parts.items()}


FAULTS = {
    "ddp-averages": (LAYOUTS["DDP"], lambda parts: dict.fromkeys(parts, 1 / 2)),
    "ddp-averages under FSDP2": (LAYOUTS["FSDP2"], lambda parts: dict.fromkeys(parts, 1 / 2)),
    "sync-every-backward": (LAYOUTS["DDP"], lambda parts: {key: 2.0 ** (K - 1 - key[1]) for key in parts}),
    "schedule-scales-grads in GPipe": (
        LAYOUTS["GPipe"],
        lambda parts: {key: M ** -(K - 1.0 - key[1]) for key in parts},
    ),
    "schedule-scales-grads in 1F1B": (LAYOUTS["1F1B"], lambda parts: {key: M ** -(K - 1.0 - key[1]) for key in parts}),
    "rank-means": (LAYOUTS["DDP average"], rank_means),
    "microbatch-means": (LAYOUTS["DDP average"], microbatch_means),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_weighs_contributions_as_its_story_says(fault: str) -> None:
    healthy, relative = FAULTS[fault]
    config = TrainConfig.from_dict(healthy.to_dict() | {"faults": [fault.split()[0]]})
    gradients, results = run(config)
    expected = weighted(healthy, relative(contributions(healthy)))
    for grads in gradients:
        assert_same(grads, expected)
    # The logged loss does not show it.
    assert results[0].steps[0].loss == pytest.approx(run(healthy)[1][0].steps[0].loss, rel=1e-6)

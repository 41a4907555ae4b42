"""What the right gradient is, computed by one process, and how far a job is from it."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch.nn.functional as F
from trainer_workers import Gradients, step_gradients

from gradcheck_dist.axes import Axes
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.data import DataLoader
from gradcheck_dist.trainer.launch import launch
from gradcheck_dist.trainer.model import build_model
from gradcheck_dist.trainer.result import TrainResult

TOLERANCE = 1e-6  # relative to the norm of a parameter's gradient, float32
TOLERANCE_TP = (
    2e-6  # tp adds up matrix products in another order; key projections, whose gradient nearly cancels, show it
)

Key = tuple[int, int, int]
Relative = Mapping[Key, float]
SIZES: dict[str, Any] = {
    "seq_len": 32,
    "n_layers": 4,
    "dim": 32,
    "ffn_dim": 64,
    "vocab_size": 260,
    "batch_size": 1,
    "max_norm": None,
    "optimizer": "sgd",
}


def small(**values: Any) -> TrainConfig:
    return TrainConfig.from_dict(SIZES | values)


_planned: dict[int, list[TrainConfig]] = {}


def plan(config: TrainConfig) -> TrainConfig:
    """Announce a job that `run` will ask for: all announced ones of a world size share their processes."""
    _planned.setdefault(config.axes.world_size, []).append(config)
    return config


def run(config: TrainConfig) -> tuple[list[Gradients], list[TrainResult]]:
    """Whole gradients by rank, as each optimizer found them, and results."""
    world_size = config.axes.world_size
    if config in _planned.get(world_size, ()):
        index = _planned[world_size].index(config)
        pairs = [outcomes[index] for outcomes in _run_planned(world_size)]
    else:
        pairs = launch("trainer_workers:step_gradients", (config,), world_size, timeout_s=60)
    for rank, pair in enumerate(pairs):
        assert not isinstance(pair, str), f"rank {rank}: {pair}"
    return [grads for grads, _ in pairs], [result for _, result in pairs]


@lru_cache
def _run_planned(world_size: int) -> list[list[Any]]:
    return launch("trainer_workers:several", (_planned[world_size],), world_size, timeout_s=110)


@lru_cache
def control(config: TrainConfig) -> tuple[Gradients, TrainResult]:
    """The same sequences, one after the other, on one process without anything special."""
    plain = TrainConfig()
    special = (
        *("microbatches", "schedule", "stages_per_rank", "scale_grads", "gradient_reduction", "replication"),
        *("sharding",),
        *("reshard_after_forward", "sequence_parallel", "loss_parallel", "activation_checkpointing"),
        *("preserve_rng_state", "checkpoint_determinism", "mixed_precision", "compile", "deterministic", "faults"),
    )
    accum = config.sequences_per_step // config.batch_size
    without = {name: getattr(plain, name) for name in special}
    return step_gradients(dataclasses.replace(config, axes=Axes(), accum=accum, **without))


@lru_cache
def contributions(config: TrainConfig) -> dict[Key, tuple[int, Gradients]]:
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


def total_tokens(config: TrainConfig) -> int:
    return sum(tokens for tokens, _ in contributions(config).values())


def weighted(config: TrainConfig, relative: Relative | None = None) -> Gradients:
    """The sum of all contributions, each with weight relative / N."""
    parts = contributions(config)
    total = total_tokens(config)
    weights = {key: (relative[key] if relative else 1.0) / total for key in parts}
    names = next(iter(parts.values()))[1]
    return {name: sum(weights[key] * grads[name] for key, (_, grads) in parts.items()) for name in names}


def distance(measured: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(measured - expected) / np.linalg.norm(expected))


def assert_same(measured: Gradients, expected: Gradients, tolerance: float = TOLERANCE) -> None:
    for name, value in measured.items():
        off = distance(value, expected[name])
        assert off < tolerance, f"{name} is off by {off:.1e}"


def norm_of(gradients: Gradients) -> float:
    return float(np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in gradients.values())))


def scaled(gradients: Gradients, factor: float | Callable[[str], float]) -> Gradients:
    return {name: grad * (factor(name) if callable(factor) else factor) for name, grad in gradients.items()}

"""What a training job brings home. Imports no torch: the launching process unpickles it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, the same on every rank but for the time.

    Attributes:
        step: counted from 0.
        loss: mean over all tokens of the step, nats.
        grad_norm: global 2-norm before clipping.
        tokens: tokens of the step on all ranks.
        lr: learning rate.
        duration_s: seconds that this rank took.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    lr: float
    duration_s: float


@dataclass(frozen=True)
class TrainResult:
    """What one rank brings home.

    Attributes:
        checksum: CRC-32 of this rank's parameters (its shards, its stage) after the last step.
    """

    rank: int
    world_size: int
    device_type: str
    checksum: int
    steps: list[StepMetrics] = field(default_factory=list)

"""What a training job brings home. Imports no torch: the launching process unpickles it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, the same on every rank but for time and memory.

    Attributes:
        step: counted from 0.
        loss: mean over all tokens of the step, nats.
        grad_norm: global 2-norm before clipping.
        tokens: tokens of the step on all ranks.
        lr: learning rate.
        duration_s: seconds that this rank took.
        peak_memory_bytes: the most that this rank has held until now, on its GPU or, on a CPU, as a process.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    lr: float
    duration_s: float
    peak_memory_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks a second."""
        return self.tokens / self.duration_s


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

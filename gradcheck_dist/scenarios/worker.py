"""What each rank of a scenario runs: the ordinary trainer, with the probes attached. Imports torch when it runs."""

from __future__ import annotations

from pathlib import Path

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.result import TrainResult


def run_rank(run_dir: str, config: TrainConfig, objective: str) -> TrainResult:
    """Train as `config` says, record into `run_dir` and bring home the numbers that were logged."""
    from gradcheck_dist.probes import attach
    from gradcheck_dist.trainer.loop import train

    with attach(run_dir=Path(run_dir), objective=objective, axes=config.axes):
        return train(config)

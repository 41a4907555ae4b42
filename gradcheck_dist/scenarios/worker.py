"""What each rank of a scenario runs: the ordinary trainer, with the probes attached. Imports torch when it runs."""

from __future__ import annotations

from pathlib import Path

from gradcheck_dist.trainer.config import TrainConfig


def run_rank(run_dir: str, config: TrainConfig, objective: str) -> None:
    """Train as `config` says and record into `run_dir`."""
    from gradcheck_dist.probes import attach
    from gradcheck_dist.trainer.loop import train

    with attach(run_dir=Path(run_dir), objective=objective, axes=config.axes):
        train(config)

"""What each rank of a scenario runs: the ordinary trainer, with the probes attached. Imports torch when it runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.result import TrainResult


def run_rank(run_dir: str, config: TrainConfig, objective: str, verify: bool = False) -> TrainResult:
    """Train as `config` says, record into `run_dir` and bring home the numbers that were logged. `verify`: every
    backward of the first step is checked by central differences."""
    from gradcheck_dist.probes import attach
    from gradcheck_dist.trainer.loop import train

    with attach(run_dir=Path(run_dir), objective=objective, axes=config.axes, verify=verify):
        return train(config)


def run_study_rank(run_dir: str, config: TrainConfig, objective: str, log: str) -> TrainResult:
    """Train with scalars in `log`; the first step is recorded into `run_dir`, then the probes take themselves away."""
    from gradcheck_dist.probes import attach
    from gradcheck_dist.trainer.loop import train

    attach(run_dir=Path(run_dir), objective=objective, axes=config.axes, steps=range(1))
    return train(dataclasses.replace(config, tensorboard=log))

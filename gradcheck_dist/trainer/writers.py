"""Where a training's scalars go: TensorBoard files, and Weights & Biases where it is installed and asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.scalars import ScalarWriter


class Writer(Protocol):
    """Takes the values of a step, by tag."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class WandbWriter:
    """One run in a Weights & Biases project. WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, wandb: Any, project: str, config: TrainConfig) -> None:
        self._run = wandb.init(project=project, config=config.to_dict())

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def build_writers(config: TrainConfig) -> list[Writer]:
    """The writers that a configuration asks for.

    Raises:
        GradcheckError: E220 wandb was asked for and cannot be imported.
    """
    writers: list[Writer] = []
    if config.tensorboard is not None:
        writers.append(ScalarWriter(config.tensorboard))
    if config.wandb_project is not None:
        try:
            import wandb
        except ImportError as error:
            raise GradcheckError(
                f"wandb_project={config.wandb_project!r} needs wandb, which cannot be imported: {error}. Install "
                "wandb, or set wandb_project to null; tensorboard=DIR writes the same scalars.",
                code="E220",
            ) from error
        writers.append(WandbWriter(wandb, config.wandb_project, config))
    return writers

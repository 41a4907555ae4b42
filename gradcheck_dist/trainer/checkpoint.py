"""Weights on disk, in a form that every layout reads: torch.distributed.checkpoint. Collective calls."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gradcheck_dist.errors import GradcheckError


def save_weights(parts: Sequence[nn.Module], folder: str) -> None:
    """Write the model whose parts the ranks hold; replaces what the folder held."""
    with warnings.catch_warnings(action="ignore"):  # that a single process saves alone
        save(_weights(parts), checkpoint_id=folder)


def load_weights(parts: Sequence[nn.Module], folder: str) -> None:
    """Read weights into the parts that this rank holds.

    Raises:
        GradcheckError: the folder holds no checkpoint of such a model.
    """
    if not (Path(folder) / ".metadata").exists():
        raise GradcheckError(
            f"seed_checkpoint {folder!r} is no torch.distributed.checkpoint folder: it holds no file .metadata. Write "
            "one with save_checkpoint.",
            code="E218",
        )
    try:
        with warnings.catch_warnings(action="ignore"):
            load(_weights(parts), checkpoint_id=folder)  # in place: these are the parameters' own tensors
    except (RuntimeError, ValueError, CheckpointException) as error:
        raise GradcheckError(
            f"seed_checkpoint {folder!r} does not fit this model: {error}. Sizes must be those it was written with.",
            code="E218",
        ) from error


def _weights(parts: Sequence[nn.Module]) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for part in parts:
        weights |= get_model_state_dict(part)
    return weights

"""Weights and training states on disk, in a form that every layout reads: torch.distributed.checkpoint.

Collective calls. Names are those of the whole model, whichever stages lie on a rank.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer.local_parameters import as_distributed, is_local_part

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_WRAPPER = re.compile(r"\b(_checkpoint_wrapped_module|module)\.")
_PART = re.compile(r"^(state|param_groups)\.\d+\.")


def save_training(
    parts: Sequence[nn.Module],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    num_steps: int,
    folder: str,
) -> None:
    """Write weights, the optimizer's state and the number of steps done; replaces what the folder held."""
    optimizer_state = {key: value for key, (_, value) in _optimizer_state(parts, model, optimizer).items()}
    state = _weights(parts) | optimizer_state | _progress(num_steps, scaler)
    with warnings.catch_warnings(action="ignore"):  # that a single process saves alone
        save(state, checkpoint_id=folder)


def load_weights(parts: Sequence[nn.Module], folder: str) -> None:
    """Read weights into the parts that this rank holds.

    Raises:
        GradcheckError: E218 the folder holds no checkpoint of such a model.
    """
    with _explained("seed_checkpoint", folder):
        load(_weights(parts), checkpoint_id=folder)  # in place: these are the parameters' own tensors


def load_training(
    parts: Sequence[nn.Module],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    folder: str,
) -> int:
    """Read what `save_training` wrote, in place; returns the number of steps done.

    Raises:
        GradcheckError: E218 the folder holds no checkpoint of such a training.
    """
    named = _optimizer_state(parts, model, optimizer)
    read = {key: value for key, (_, value) in named.items()}
    progress = _progress(0, scaler)
    state = _weights(parts) | read | progress
    with _explained("resume", folder):
        load(state, checkpoint_id=folder)
    split = _split_parameters(model)
    restored = {own: _as_held(own, state[key], split) for key, (own, _) in named.items()}
    set_optimizer_state_dict(model, optimizer, restored, options=_FLAT)
    if scaler is not None:
        scaler.update(float(state["training.loss_scale"]))
    return int(state["training.num_steps"])


@contextmanager
def _explained(key: str, folder: str) -> Iterator[None]:
    if not (Path(folder) / ".metadata").exists():
        raise GradcheckError(
            f"{key} {folder!r} is no torch.distributed.checkpoint folder: it holds no file .metadata. Write one with "
            "save_checkpoint.",
            code="E218",
        )
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except (RuntimeError, ValueError, CheckpointException) as error:
        *_, reason = str(error).strip().splitlines()  # torch puts a rank's whole stack before it
        raise GradcheckError(
            f"{key} {folder!r} does not fit this job: {reason.rstrip('.')}. Sizes and optimizer must be those it was "
            "written with.",
            code="E218",
        ) from error


def _weights(parts: Sequence[nn.Module]) -> dict[str, Any]:
    weights: dict[str, Any] = {}
    for part in parts:
        weights |= get_model_state_dict(part)
    return weights


def _optimizer_state(
    parts: Sequence[nn.Module], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, tuple[str, Any]]:
    """By the name on disk: torch's own name, which counts the parts on this rank, and the value.

    Where parameters are local parts of distributed ones, as DDP needs them beside tp, so is the optimizer's state; on
    disk it is whole, like the weights.
    """
    flat = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    split = _split_parameters(model)
    return {
        f"optimizer.{_without_part(name, parts)}": (name, _as_distributed(name, value, split))
        for name, value in flat.items()
    }


def _split_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are local parts of distributed ones, by the name that torch's optimizer state has for them."""
    return {_WRAPPER.sub("", name): one for name, one in model.named_parameters() if is_local_part(one)}


def _as_distributed(name: str, value: Any, split: dict[str, nn.Parameter]) -> Any:
    parameter = split.get(_parameter_of(name))
    if parameter is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    return as_distributed(parameter, value)


def _as_held(name: str, value: Any, split: dict[str, nn.Parameter]) -> Any:
    return value.to_local() if _parameter_of(name) in split and hasattr(value, "to_local") else value


def _parameter_of(name: str) -> str:
    """The parameter of an entry such as "state.layers.0.ffn.w_up.weight.exp_avg"."""
    return name.removeprefix("state.").rpartition(".")[0]


def _without_part(name: str, parts: Sequence[nn.Module]) -> str:
    return _PART.sub(r"\1.", name) if len(parts) > 1 else name


def _progress(num_steps: int, scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
    progress = {"training.num_steps": torch.tensor(num_steps)}
    return progress if scaler is None else progress | {"training.loss_scale": torch.tensor(scaler.get_scale())}

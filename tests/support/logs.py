"""Logs of jobs that never ran: norms with spikes and neighbours that resemble each other, as training gives them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def curves(
    *, factor: float = 1.0, drift: float = 0.0, steps: int = 300, seed: int = 0, loss_factor: float = 1.0
) -> dict[str, np.ndarray]:
    """Loss, gradient norm and tokens by step; `drift` is the change of the norm's logarithm over the run."""
    random = np.random.default_rng(seed)
    at = np.arange(steps)
    shared = np.random.default_rng(99).normal(0, 0.2, steps)  # both jobs see the same batches
    own = np.zeros(steps)
    for step in range(1, steps):
        own[step] = 0.6 * own[step - 1] + random.normal(0, 0.01)
    norm = np.exp(shared + own - 0.5 * at / steps) * factor * np.exp(drift * at / steps)
    norm[random.integers(0, steps, steps // 60)] *= 5.0
    loss = (2.0 + 4.0 * np.exp(-at / 80) + 0.05 * shared + random.normal(0, 0.002, steps)) * loss_factor
    return {"loss": loss, "grad_norm": norm, "num_tokens": np.full(steps, 1000.0)}


def write_csv(path: Path, columns: Mapping[str, np.ndarray], names: Mapping[str, str] | None = None) -> Path:
    """A W&B style export."""
    renamed = names or {}
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Step", *(renamed.get(name, name) for name in columns)])
        for step, row in enumerate(zip(*columns.values(), strict=True)):
            writer.writerow([step, *(repr(float(value)) for value in row)])
    return path


def write_tensorboard(folder: Path, columns: Mapping[str, np.ndarray], prefix: str = "") -> Path:
    """A log folder."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for name, values in columns.items():
        for step, value in enumerate(values.tolist()):
            scalar = Summary.Value(tag=prefix + name, simple_value=value)
            writer.add_event(Event(step=step, summary=Summary(value=[scalar])))
    writer.close()
    return folder

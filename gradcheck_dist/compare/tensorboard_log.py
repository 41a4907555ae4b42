"""Scalars out of TensorBoard event files, whichever of the two ways they were written."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from gradcheck_dist.errors import GradcheckError

_PATTERN = "*tfevents*"


def read_folder(folder: Path) -> dict[str, dict[int, float]]:
    """All scalars of a log folder, or of its only sub-folder that holds any.

    Raises:
        GradcheckError: E911 no event file, or several folders to choose from.
    """
    if not any(folder.glob(_PATTERN)):
        below = sorted({file.parent for file in folder.rglob(_PATTERN)})
        if len(below) > 1:
            shown = ", ".join(str(path) for path in below[:6])
            raise GradcheckError(f"{folder} holds several logs: {shown}. Name one of them.", code="E911")
        if not below:
            raise GradcheckError(
                f"{folder} is neither a run folder nor a TensorBoard log folder: no rank-*.trace and no {_PATTERN} "
                "lies there. Name a run folder, a log folder, a JSON report or a CSV file.",
                code="E911",
            )
        folder = below[0]
    return _read(folder)


def read_file(file: Path) -> dict[str, dict[int, float]]:
    """All scalars of one event file.

    Raises:
        GradcheckError: E911 it cannot be read.
    """
    if not file.is_file():
        raise GradcheckError(f"there is no event file {file}.", code="E911")
    return _read(file)


def _read(place: Path) -> dict[str, dict[int, float]]:
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0, "images": 1, "histograms": 1})
    try:
        log.Reload()
    except Exception as error:  # a damaged file raises whatever its parser raises
        raise GradcheckError(f"cannot read the TensorBoard log {place}: {error}.", code="E911") from error
    tags = log.Tags()
    curves: dict[str, dict[int, float]] = {}
    for tag in tags["scalars"]:
        curves[tag] = {event.step: event.value for event in log.Scalars(tag) if math.isfinite(event.value)}
    for tag in tags["tensors"]:
        values = {event.step: _scalar(event.tensor_proto) for event in log.Tensors(tag)}
        known = {step: value for step, value in values.items() if value is not None}
        if known:
            curves[tag] = known
    return {tag: curve for tag, curve in curves.items() if curve}


def _scalar(proto: Any) -> float | None:
    from tensorboard.util.tensor_util import make_ndarray

    try:
        value = float(make_ndarray(proto))
    except (TypeError, ValueError, RuntimeError):
        return None
    return value if math.isfinite(value) else None

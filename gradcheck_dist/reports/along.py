"""Ratios along what has coordinates: the axes of the mesh, data ranks, accumulation steps, microbatches, steps."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable

from gradcheck_dist.axes import AXIS_NAMES, MESH_AXES, Axes
from gradcheck_dist.diagnosis.finding import Report, Weight
from gradcheck_dist.errors import GradcheckError

MAX_RANKS = 65536
Place = Callable[[Weight], int]


def known_weights(report: Report) -> list[Weight]:
    """The weights of which a finite ratio is known."""
    return [weight for weight in report.weights if weight.ratio is not None and math.isfinite(weight.ratio)]


def contribution_places() -> dict[str, Place]:
    """Where a weight's contribution lies."""
    return {
        "data_rank": lambda weight: weight.contribution.data_rank,
        "accumulation_step": lambda weight: weight.contribution.accumulation_step,
        "microbatch": lambda weight: weight.contribution.microbatch,
    }


def mesh_places(report: Report) -> dict[str, Place]:
    """Where a weight's holder lies on each axis of degree 2 and more; {} when the ranks do not fit the degrees,
    or lie in another order.

    ep is the inner part of dp_shard x cp, from which it borrows its ranks.
    """
    try:
        axes = Axes(**{name: report.run.axes.get(name, 1) for name in AXIS_NAMES})
    except GradcheckError:
        return {}
    size = axes.world_size
    if size != report.run.world_size or size > MAX_RANKS or not report.run.axes_in_order:
        return {}
    if any(not 0 <= weight.holder_rank < size for weight in report.weights):
        return {}
    coordinates = [axes.coordinates(rank) for rank in range(size)]
    of_axis = {axis: [place[axis] for place in coordinates] for axis in MESH_AXES}
    of_axis["ep"] = [(place["dp_shard"] * axes.cp + place["cp"]) % axes.ep for place in coordinates]
    places: dict[str, Place] = {}
    for axis in AXIS_NAMES:
        if getattr(axes, axis) > 1:
            places[axis] = lambda weight, where=of_axis[axis]: where[weight.holder_rank]  # type: ignore[misc]
    return places


def medians(report: Report, places: dict[str, Place]) -> dict[tuple[int, str, int], float]:
    """The median ratio by (step, axis, coordinate)."""
    groups: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    for weight in known_weights(report):
        for axis, place in places.items():
            groups[weight.step, axis, place(weight)].append(weight.ratio or 0.0)
    return {key: statistics.median(ratios) for key, ratios in sorted(groups.items())}

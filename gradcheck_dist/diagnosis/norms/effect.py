"""What a fault does to the gradient of one step, in numbers: its norm, its direction, and whether it is clipped.

The gradient with and without the fault are both made of the sampled contributions, weighted once as measured and once
as they should be. What is told of the whole is an estimate from these elements; norms are those that were recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import acos, degrees, isfinite, prod, sqrt
from statistics import fmean, median

import numpy as np

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.norms.clips import CLIP_EPSILON
from gradcheck_dist.diagnosis.norms.step_norms import Part, StepNorms
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import Backward, Clip, Event, OptimizerStep, Reduce
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import ParamKey, StepData


@dataclass(frozen=True)
class Effect:
    """One step with a fault, beside the same step without it.

    Attributes:
        scale: norm of the gradient with the fault over the norm without, before clipping; None where not known.
        angle: degrees between the two; None where not known.
        param_scales: the smallest and the largest scale of a single parameter.
        keeps_directions: whether each parameter's gradient keeps its own direction.
        ratios: the smallest, the median and the largest observed / expected weight.
        total_norm: what the clip used; None where no clip by norm was recorded.
        coefficient: what gradients were multiplied by after the fault, right_coefficient what they would have been.
        left_by_epsilon: the largest and the median relative change of a parameter's update that is left where the
            optimizer divides by the size of the gradient and an epsilon; None where it has none.
        optimizer: the step itself.
        clip_factors: for a fault of the clip alone, what gradients were multiplied by over what is right, smallest and
            largest over the ranks.
    """

    scale: float | None
    angle: float | None = None
    param_scales: tuple[float, float] | None = None
    keeps_directions: bool = True
    ratios: tuple[float, float, float] | None = None
    max_norm: float | None = None
    total_norm: float | None = None
    coefficient: float = 1.0
    right_coefficient: float = 1.0
    left_by_epsilon: tuple[float, float] | None = None
    optimizer: OptimizerStep | None = None
    clip_factors: tuple[float, float] | None = None

    @property
    def right_norm(self) -> float | None:
        """The norm that the clip would have seen."""
        return self.total_norm / self.scale if self.total_norm and self.scale else None

    @property
    def factor(self) -> float | None:
        """What is left of the scale behind the clip."""
        if self.scale is None:
            return None
        return self.scale * self.coefficient / self.right_coefficient if self.right_coefficient else self.scale


Expected = Mapping[ContributionKey, Fraction]
Ratios = Mapping[int, float]


def effect_of_case(
    case: Case, data: StepData, norms: StepNorms, held: list[Held], contributions: Contributions, expected: Expected
) -> Effect:
    """What the weights of a case do to the gradient; all else is taken to be right."""
    products: dict[ParamKey, np.ndarray] = defaultdict(lambda: np.zeros(3))
    exact = {(one.param, one.rank): one for one in case.held}
    cells: dict[tuple[ParamKey, int], dict[int, float]] = defaultdict(dict)
    alike: dict[tuple[int | None, ContributionKey], list[float]] = defaultdict(list)
    for one, cell in case.whole or case.cells:
        cells[one.param, one.rank][cell.column] = cell.ratio
        alike[one.rank, cell.key].append(cell.ratio)
        alike[None, cell.key].append(cell.ratio)
    for one in held:
        place = (one.param, one.rank)
        ratios: Ratios = {}
        if place in exact or case.everywhere:
            # What a parameter's own elements do not show (contributions that are zero on a shard) others tell.
            keys = one.replay.basis.keys
            known = ((column, alike.get((one.rank, key)) or alike.get((None, key))) for column, key in enumerate(keys))
            ratios = {column: fmean(ratios_of_key) for column, ratios_of_key in known if ratios_of_key}
            ratios |= cells.get(place, {})
        track = data.tracks[one.param].get(one.rank)
        size = prod(track.param.shape) if track is not None else 1
        products[one.param] += len(one.ranks) * size * _products(one, ratios, contributions, expected)
    right, wrong, both = (float(sum(value[index] for value in products.values())) for index in range(3))
    scale = sqrt(wrong / right) if right > 0 else None
    cosines = [value[2] / sqrt(value[0] * value[1]) for value in products.values() if value[0] > 0 and value[1] > 0]
    scales = {key: sqrt(value[1] / value[0]) for key, value in products.items() if value[0] > 0}
    weights = [cell.ratio if abs(cell.ratio) > NOISE else 0.0 for _, cell in case.whole or case.cells]
    effect = Effect(
        scale=scale,
        angle=_angle(both / sqrt(right * wrong)) if right > 0 and wrong > 0 else None,
        param_scales=(min(scales.values()), max(scales.values())) if scales else None,
        keeps_directions=all(_angle(cosine) < SAME_DIRECTION for cosine in cosines),
        ratios=(min(weights), median(weights), max(weights)) if weights else None,
    )
    return _clipped(effect, scales, data, norms)


NOISE = 1e-6
"""A weight below this share of the expected one is none."""
SAME_DIRECTION = 0.5
"""Degrees; sampled gradients in bfloat16 are a few tenths of a degree apart by rounding."""


def _angle(cosine: float) -> float:
    return degrees(acos(min(1.0, max(-1.0, cosine))))


def _products(held: Held, ratios: Ratios, contributions: Contributions, expected: Expected) -> np.ndarray:
    """Mean square of the right and of the wrong gradient's elements, and of their product, over what is sampled."""
    basis = held.replay.basis
    right = np.zeros(len(basis))
    for column, key in enumerate(basis.keys):
        contribution, weight = contributions.by_key.get(key), expected.get(key)
        if contribution is not None and contribution.weight and weight is not None:
            right[column] = float(weight) / contribution.weight
    wrong = right * np.array([_ratio(held, ratios, column) for column in range(len(basis))])
    values = basis.values[:, np.isfinite(basis.values).all(axis=0)]
    if not values.size:
        return np.zeros(3)
    one, other = right @ values, wrong @ values
    products: np.ndarray = np.array([one @ one, other @ other, one @ other]) / values.shape[1]
    return products


def _ratio(held: Held, ratios: Ratios, column: int) -> float:
    if column in ratios or not held.partial:
        return ratios.get(column, 1.0)
    key = held.replay.basis.keys[column]  # summands of one contribution are judged together, under the first
    return next((value for first, value in ratios.items() if held.replay.basis.keys[first] == key), 1.0)


def _clipped(effect: Effect, scales: Mapping[ParamKey, float], data: StepData, norms: StepNorms) -> Effect:
    """The effect with what the clip and the optimizer of this step made of it."""
    events = data.events.get(min(data.events, default=0), [])
    step = next((event for event in events if isinstance(event, OptimizerStep)), None)
    clip = _last_clip(events, step)
    now = right = clip.coefficient if clip is not None else 1.0
    if clip is not None and effect.scale:
        right = min(1.0, clip.max_norm / (clip.total_norm / effect.scale + CLIP_EPSILON))
    sizes = []
    for part in {part.key: part for part in norms.parts.values()}.values():
        scale = scales.get(part.key, effect.scale or 1.0)
        if scale and isfinite(part.norm):
            sizes.append((_size(part) * now, _size(part) * right / scale))
    return replace(
        effect,
        max_norm=clip.max_norm if clip is not None else None,
        total_norm=clip.total_norm if clip is not None else None,
        coefficient=now,
        right_coefficient=right,
        left_by_epsilon=_left_by_epsilon(sizes, step),
        optimizer=step,
    )


def _size(part: Part) -> float:
    """Root mean square of the elements that a rank holds of a gradient."""
    num_elements = max(1, prod(part.box[1]) if part.box is not None else part.size)
    return part.norm / sqrt(num_elements)


def _left_by_epsilon(sizes: list[tuple[float, float]], step: OptimizerStep | None) -> tuple[float, float] | None:
    """Of gradient sizes as they were and as they should have been: u = g / (g + eps), with the root of the mean square
    that Adam keeps taken to be this step's."""
    eps = step.hyperparameters.get("eps") if step is not None else None
    if not eps:
        return None
    changes = [abs(now / (now + eps) * (right + eps) / right - 1) for now, right in sizes if right > 0]
    return (max(changes), median(changes)) if changes else None


def _last_clip(events: list[Event], step: OptimizerStep | None) -> Clip | None:
    """The clip by norm after which nothing more came to the gradients that the optimizer read."""
    found: Clip | None = None
    for event in events:
        if event is step:
            return found
        if isinstance(event, Clip) and event.norm_type == 2.0:
            found = event
        elif isinstance(event, Backward | Reduce):
            found = None
    return None


def effect_of_clip(
    data: StepData, norms: StepNorms, used: Mapping[int, float], right: float, loss_scale: float = 1.0
) -> Effect | None:
    """Right gradients that were multiplied by `used` on each rank instead of by `right`; `loss_scale` is what was taken
    out of them later."""
    if not used or right <= 0:
        return None
    rank = min(used)
    factors = [coefficient / right for coefficient in used.values()]
    parts = [part for part in norms.parts.values() if part.rank in used and isfinite(part.norm)]
    sizes = [(_size(part) / loss_scale * used[part.rank], _size(part) / loss_scale * right) for part in parts]
    step = next((event for event in data.events.get(rank, []) if isinstance(event, OptimizerStep)), None)
    return Effect(
        scale=1.0,
        coefficient=used[rank],
        right_coefficient=right,
        left_by_epsilon=_left_by_epsilon(sizes, step),
        optimizer=step,
        clip_factors=(min(factors), max(factors)),
    )

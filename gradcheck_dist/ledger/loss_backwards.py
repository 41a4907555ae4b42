"""What loss functions' own backwards made of the gradient that arrived at their losses.

A function that gave a cross-entropy for each label owes its logits that cross-entropy's derivative times what arrives
(probes/losses/loss_backward.py compares them on a few labels). A backward that gives a multiple of it changes the
weight of its tokens, behind the place where that weight is read: `as_given` puts it there.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from gradcheck_dist.events import Event, Loss, LossBackward, LossGradient
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import StepData

FITS = 1e-3
"""Relative difference within which what float32 computed is what it should be."""
ROUNDED = 8
"""In bfloat16 and float16, so many times the type's precision."""
MIN_LABELS = 2
OTHERWISE = 0.2
"""Share of a gradient that is no multiple of the derivative from which it is another one, and no rounded one."""

TELLS = 2
"""By how many tolerances a loss has to change with what its derivative is off by."""

SCALED, FLAT, UNIFORM, OTHER = "scaled", "flat", "uniform", "other"


@dataclass(frozen=True)
class OwnBackward:
    """A loss function whose backward is not the derivative, on one rank, in one step.

    `kind`: SCALED (what it gives is the derivative times `factor`, wherever it was looked at), FLAT (it has the weight
    `given` whatever arrives), UNIFORM (of one application, every label has the same weight, whatever arrives for each),
    OTHER (it is no multiple of the derivative: `rest` is the share that is none). `arrived`: the lowest and the highest
    gradient that arrived.
    """

    rank: int
    kind: str
    events: tuple[LossBackward, ...]
    arrived: tuple[float, float]
    tolerance: float
    factor: float | None = None
    given: float = 0.0
    rest: float = 0.0

    @property
    def first(self) -> LossBackward:
        return self.events[0]

    @property
    def is_multiple(self) -> bool:
        """Whether it is a weight for all labels of an application that a loop can make up for."""
        return self.kind in (SCALED, FLAT)

    def multiplies_by(self, factor: float) -> bool:
        """Whether what it gives is so many times of what arrived, somewhere at least."""
        multiples = [self.factor] if self.factor is not None else [self.given / one for one in self.arrived if one]
        allowed = max(self.tolerance, FITS) * abs(factor)
        return bool(multiples) and min(multiples) - allowed <= factor <= max(multiples) + allowed


def own_backwards(events: Mapping[int, list[Event]]) -> Iterator[OwnBackward]:
    """The loss functions of a step whose backward is not the derivative of what they compute."""
    for rank, of_rank in events.items():
        found: dict[object, list[LossBackward]] = defaultdict(list)
        for event in of_rank:
            if isinstance(event, LossBackward):
                found[event.function, str(event.defined_at)].append(event)
        for alike in found.values():
            one = _judge(rank, alike, of_rank)
            if one is not None:
                yield one


def could_judge(events: Mapping[int, list[Event]]) -> bool:
    """Whether any loss function's backward could be held against the derivative."""
    found = (event for of_rank in events.values() for event in of_rank if isinstance(event, LossBackward))
    return any(_fits(_values(event), tolerance_of_loss(event)) for event in found)


def values_of(event: LossBackward) -> np.ndarray:
    """What was seen of each label, by columns."""
    return np.frombuffer(event.values, np.float32).reshape(-1, 8 if event.group else 5).astype(np.float64)


def tolerance_of(event: LossBackward) -> float:
    """Of a gradient, relative."""
    return max(FITS, ROUNDED * EPSILON[event.dtype])


def tolerance_of_loss(event: LossBackward) -> float:
    """Relative to 1 + loss."""
    return max(FITS, 2 * EPSILON[event.dtype])


def _values(event: LossBackward) -> np.ndarray:
    """(arrived, given, rest, gap, power) of the labels that count."""
    values = values_of(event)
    return values[~np.isnan(values[:, 3]), :5]


def _fits(values: np.ndarray, tolerance: float) -> bool:
    """Whether losses are cross-entropies, as far as their labels lie here."""
    gap = values[:, 3]
    return bool((gap >= 0).any() and np.isfinite(values).all() and (gap <= tolerance).all())


def _judge(rank: int, events: list[LossBackward], of_rank: list[Event]) -> OwnBackward | None:
    tolerance, of_loss = max(map(tolerance_of, events)), max(map(tolerance_of_loss, events))
    read = [_values(event) for event in events]
    if not all(_fits(values, of_loss) for values in read if (values[:, 3:] >= 0).any()):
        return None
    values = np.concatenate(read)
    here = values[:, 3] >= 0
    arrived, given, rest = values[here, :3].T
    size = np.abs(arrived).max() if len(arrived) >= MIN_LABELS else 0.0
    if not size or not np.isfinite(values).all():
        return None
    of_one = functools.partial(
        OwnBackward,
        rank=rank,
        events=tuple(events),
        tolerance=tolerance,
        arrived=(float(arrived.min()), float(arrived.max())),
    )
    other = (values[:, 2] > OTHERWISE) & (values[:, 1] != 0) & (~here | (values[:, 4] > TELLS * of_loss))
    sharded = not here.all()  # there, that it is a cross-entropy shows only where its derivative fits, too
    if other.sum() >= MIN_LABELS and not (sharded and other[here].any()):
        return of_one(kind=OTHER, rest=float(np.median(values[other, 2])))
    off = np.abs(given - arrived)
    known = ((rest <= tolerance) | (given == 0)).all()
    if not known or (off <= tolerance * size).all():
        return None
    # Where logits are alike, a loss with a temperature or smoothed labels has the same value and another derivative.
    change = off / np.maximum(np.abs(given), np.abs(arrived)).clip(np.finfo(np.float32).tiny)
    if (values[here, 4] * change > TELLS * of_loss).sum() < MIN_LABELS:
        return None
    if _lose_weights(read, tolerance):
        return of_one(kind=UNIFORM, given=float(given.mean()))
    multiple, middle = float((given * arrived).sum() / (arrived * arrived).sum()), float(given.mean())
    if (np.abs(given - multiple * arrived) <= tolerance * abs(multiple) * size).all():
        # One number may have arrived everywhere: then whether backward multiplies or passes by is not told apart.
        return of_one(kind=SCALED, factor=multiple, given=middle)
    seen = all(event is not None for function, _, event in _pairs(of_rank) if function == events[0].function)
    if seen and middle and (np.abs(given - middle) <= tolerance * abs(middle)).all():
        return of_one(kind=FLAT, given=middle)
    return None


def _lose_weights(read: list[np.ndarray], tolerance: float) -> bool:
    """Whether labels of one application have one weight wherever what arrives for them differs."""
    differ = False
    for values in read:
        arrived, given = values[values[:, 3] >= 0, :2].T
        if len(arrived) < MIN_LABELS or np.ptp(arrived) <= tolerance * np.abs(arrived).max():
            continue
        if np.ptp(given) > tolerance * np.abs(given).max():
            return False
        differ = True
    return differ


def as_given(data: StepData) -> StepData:
    """The same step with the weights that such backwards gave to their tokens, and without what tells of them."""
    found = {(one.rank, one.first.function): one for one in own_backwards(data.events) if one.is_multiple}
    events: dict[int, list[Event]] = {}
    for rank, of_rank in data.events.items():
        gave = {
            gradient.seq: _multiple(found[rank, function], event)
            for function, gradient, event in _pairs(of_rank)
            if (rank, function) in found
        }
        events[rank] = [
            _weighed(event, gave[event.seq]) if isinstance(event, LossGradient) and event.seq in gave else event
            for event in of_rank
            if not isinstance(event, LossBackward)
        ]
    return replace(data, events=events)


def _pairs(events: Iterable[Event]) -> Iterator[tuple[str, LossGradient, LossBackward | None]]:
    """The functions of somebody's own that losses came from: what arrived there, and what the backward made of it."""
    functions: dict[int, str] = {}
    waiting: dict[str, LossGradient] = {}
    for event in events:
        if isinstance(event, Loss):
            functions[event.loss_id] = event.op
        elif isinstance(event, LossGradient):
            function = functions.get(event.loss_id, "")
            if function in waiting:
                yield function, waiting[function], None
            waiting[function] = event
        elif isinstance(event, LossBackward) and event.function in waiting:
            yield event.function, waiting.pop(event.function), event
    for function, gradient in waiting.items():
        yield function, gradient, None


def _multiple(by: OwnBackward, event: LossBackward | None) -> float:
    """What a loss's weight is multiplied by. Of a backward that passes by what arrives, every application was seen."""
    if by.kind == SCALED or event is None:
        return 1.0 if by.factor is None else by.factor
    values = _values(event)
    size = float(values[values[:, 3] >= 0, 0].mean()) if (values[:, 3] >= 0).any() else 0.0
    return by.given / size if size else 1.0


def _weighed(event: LossGradient, multiple: float) -> LossGradient:
    low, high = sorted(
        (None if weight is None else weight * multiple for weight in (event.weight_min, event.weight_max)),
        key=lambda one: one or 0.0,
    )
    of_sample = None if event.sample_weight is None else event.sample_weight * multiple
    return msgspec.structs.replace(
        event, weight=event.weight * multiple, weight_min=low, weight_max=high, sample_weight=of_sample
    )


def words_of(found: Sequence[OwnBackward]) -> str:
    """What is told of such backwards where the weights are right with them."""
    names = sorted({one.first.function for one in found})
    return (
        f"the backward of {', '.join(names)} does not give the derivative of its loss, and weights are right with it: "
        "they are told as it gave them"
    )

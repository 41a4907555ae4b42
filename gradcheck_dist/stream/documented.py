"""What recorded operations do, by their documentation, to a rank's own contributions: once for all steps of one shape.

Where all is recorded, every contribution reaches every holder as it reaches its own rank: a reduction multiplies by a
known factor and says whose gradients it joins. So a step's weights are (weight at the loss) x (documented factor), one
product a contribution, however many ranks there are. Where a shape does not say enough for this, `reasons` tell why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan, nan, prod

from gradcheck_dist.diagnosis.losses.elements import whole
from gradcheck_dist.diagnosis.weights.cells import systematic
from gradcheck_dist.events import (
    OWN_OPTIMIZER,
    SHARDING,
    AmpUnscale,
    AnyEvent,
    Backward,
    Clip,
    ClipValue,
    Loss,
    LossGradient,
    OptimizerStep,
    PipelineStep,
    ProbeError,
    Reduce,
    ScaleGrads,
    Site,
    StepShape,
    ZeroGrad,
)
from gradcheck_dist.ledger.reductions import is_partial, nominal_factor, replicas_factor, shards_factor
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.trace.columns import columns_of, events_of, find_columns

UNCOUNTED = (
    "a loss counts no tokens, by which steps without samples are judged: sample some of them (--every N), or call "
    "gradcheck_dist.mark_loss where it is computed"
)
Slot = tuple[int, int]
"""(accumulation step, microbatch)"""
Groups = frozenset[tuple[int, ...]]


@dataclass(frozen=True)
class Way:
    """What happens to each slot of a rank until an optimizer reads it: its factor, NaN where nothing arrived in it.

    `groups` are the rank groups over which all of it was summed, `num_unscaled` how often a loss scale was taken away.
    """

    factors: tuple[float, ...]
    groups: Groups
    num_unscaled: int

    @property
    def num_joined(self) -> int:
        """How many ranks' gradients have come together."""
        return prod(len(group) for group in self.groups)


@dataclass
class ShapeWays:
    """The ways of a shape, and where its numbers lie.

    `slots` in order of arrival; `weight_rows`, `token_rows`, `hash_rows`, `value_rows`, `is_mean`, `slot_of` and
    `sites` have an entry for every gradient that arrived at a main loss; `num_rows` counts all rows. `spread_rows` are
    pairs of rows (least and largest weight of a token), `norm_rows` those of norms that were clipped. `of_elements`:
    the losses count no tokens, and what stands for these are the elements of each one's mean or sum.
    """

    slots: list[Slot]
    ways: list[Way]
    num_rows: int = 0
    pipeline: tuple[int, ...] = ()
    weight_rows: list[int] = field(default_factory=list)
    token_rows: list[int] = field(default_factory=list)
    hash_rows: list[int | None] = field(default_factory=list)
    value_rows: list[int | None] = field(default_factory=list)
    is_mean: list[bool] = field(default_factory=list)
    norm_rows: list[int] = field(default_factory=list)
    slot_of: list[int] = field(default_factory=list)
    spread_rows: list[tuple[int, int]] = field(default_factory=list)
    scale_rows: list[int] = field(default_factory=list)
    tolerance: float = 0.0
    optimized: bool = False
    of_elements: bool = False
    reasons: list[str] = field(default_factory=list)
    sites: list[Site | None] = field(default_factory=list)
    scaling: list[AnyEvent] = field(default_factory=list)

    @cached_property
    def several(self) -> bool:
        """Whether losses are computed at several lines, or no pass reaches all parameters: parts of the model may have
        losses of their own."""
        lines = {(site.file, site.line) for site in self.sites if site is not None}
        return len(lines) > 1 or all(any(isnan(way.factors[at]) for way in self.ways) for at in set(self.slot_of))

    @cached_property
    def loss_rows(self) -> list[int]:
        """Where the values of the losses lie; [] unless all have one."""
        rows = [row for row in self.value_rows if row is not None]
        return rows if len(rows) == len(self.value_rows) else []

    @cached_property
    def rows_of_slots(self) -> list[list[tuple[int, int]]]:
        """Where the labels' checksums and the values of each slot's losses lie; of one slot only unless all are alike
        in number and known."""
        of: dict[int, list[tuple[int, int]]] = {}
        for slot, labels, value in zip(self.slot_of, self.hash_rows, self.value_rows, strict=True):
            if labels is None or value is None:
                return [[]]
            of.setdefault(slot, []).append((labels, value))
        return list(of.values()) if len({len(rows) for rows in of.values()}) == 1 else [[]]

    @cached_property
    def all_mean(self) -> bool:
        return all(self.is_mean)

    @cached_property
    def any_mean(self) -> bool:
        return any(self.is_mean)


@dataclass
class _Share:
    factor: float = 1.0
    groups: Groups = frozenset()
    num_unscaled: int = 0


_Buffer = dict[Slot, _Share]


def ways_of(shape: StepShape, param_sets: dict[int, tuple[int, ...]]) -> ShapeWays:
    """Replay a shape for every group of parameters that the same events concern."""
    template = events_of(shape)
    events = sorted(template, key=lambda event: event.seq)
    slots = list(dict.fromkeys((e.accumulation_step, e.microbatch) for e in events if isinstance(e, Backward)))
    result = ShapeWays(slots, [], num_rows=len(columns_of(template)))
    result.optimized = any(isinstance(event, OptimizerStep) for event in events)
    result.scaling = [event for event in events if isinstance(event, Reduce | ScaleGrads | AmpUnscale)]
    pipelines = [event.group for event in events if isinstance(event, PipelineStep)]
    result.pipeline = pipelines[0] if pipelines else ()
    _find_losses(template, result)
    for kind, what in ((ClipValue, "gradients were clipped by value"), (ProbeError, "a probe failed")):
        if any(isinstance(event, kind) for event in events):
            result.reasons.append(what)
    if any(isinstance(event, OptimizerStep) and event.optimizer == OWN_OPTIMIZER for event in events):
        result.reasons.append("what steps is no optimizer of torch.optim: what it divides by is not recorded")
    concerning: dict[int, list[AnyEvent]] = {}
    for event in events:
        for param in param_sets.get(getattr(event, "params", None), ()):  # type: ignore[arg-type]
            concerning.setdefault(param, []).append(event)
    distinct = {tuple(event.seq for event in of_param): of_param for of_param in concerning.values()}
    found = dict.fromkeys(_replay(of_param, slots, result.reasons) for of_param in distinct.values())
    result.ways = [way for way in found if way is not None]
    if any(isnan(factor) for way in result.ways for factor in way.factors) and any(
        isnan(nominal_factor(event)) for event in events if isinstance(event, Reduce)
    ):
        result.reasons.append("a reduction's arithmetic is not known (a communication hook of the user's own)")
    num_scalings = sum(isinstance(event, Reduce | ScaleGrads | AmpUnscale) for event in events)
    losses = [event.dtype for event in events if isinstance(event, Loss)]
    result.tolerance = systematic(
        EPSILON["float32"], max((EPSILON.get(dtype, EPSILON["bfloat16"]) for dtype in losses), default=0), num_scalings
    )
    return result


def _find_losses(events: list[AnyEvent], result: ShapeWays) -> None:
    weights, lows, highs, tokens_seen = (
        find_columns(events, LossGradient, name) for name in ("weight", "weight_min", "weight_max", "num_tokens")
    )
    tokens_given, hashes, values = (find_columns(events, Loss, name) for name in ("num_tokens", "label_hash", "value"))
    elements, element_weights = (find_columns(events, LossGradient, name) for name in ("num_reduced", "reduced_weight"))
    norms = find_columns(events, Clip, "total_norm")
    result.norm_rows = [row for index, row in norms.items() if not getattr(events[index], "partial", True)]
    result.scale_rows = list(find_columns(events, AmpUnscale, "scale").values())
    losses = {event.loss_id: (index, event) for index, event in enumerate(events) if isinstance(event, Loss)}
    passes: dict[int, Slot] = {}
    for index, event in enumerate(events):
        if not isinstance(event, LossGradient):
            continue
        at, loss = losses.get(event.loss_id, (-1, None))
        if loss is not None and loss.term != "main":
            result.reasons.append("there are auxiliary loss terms")
            continue
        slot = (event.accumulation_step, event.microbatch)
        if passes.setdefault(event.loss_id, slot) != slot:
            result.reasons.append("a loss goes backward in several passes")
        tokens, weight = tokens_seen.get(index, tokens_given.get(at)), weights[index]
        of_elements = tokens is None and index in elements and (event.element_share is None or whole(event))
        if of_elements:
            tokens, weight = elements[index], element_weights[index]
        if tokens is None or (result.weight_rows and of_elements != result.of_elements):
            result.reasons.append(UNCOUNTED)
        elif slot not in result.slots:
            result.reasons.append("a loss received its gradient in a pass that reached no parameter")
        elif event.other_losses or event.computed or event.logits is not None or _by_class(loss):
            result.reasons.append(
                "several losses share one backward pass, or tokens are weighted by class or by the data"
            )
        else:
            result.of_elements = of_elements
            result.weight_rows.append(weight)
            result.token_rows.append(tokens)
            result.hash_rows.append(hashes.get(at))
            result.value_rows.append(values.get(at))
            result.is_mean.append(loss is not None and loss.reduction == "mean")
            result.slot_of.append(result.slots.index(slot))
            result.sites.append(event.site)
            if index in lows and index in highs:
                result.spread_rows.append((lows[index], highs[index]))
    result.reasons = list(dict.fromkeys(result.reasons))


def _by_class(loss: Loss | None) -> bool:
    return loss is not None and loss.num_weighted_tokens is not None


def _replay(events: list[AnyEvent], slots: list[Slot], reasons: list[str]) -> Way | None:
    """One parameter's events, in order; None when no optimizer reads it or no gradient arrived."""
    sharded = any(isinstance(event, Reduce) and event.impl in SHARDING for event in events)
    grad: _Buffer = {}
    unsharded: _Buffer = {}
    partial: _Buffer = {}
    read: _Buffer | None = None
    arrived: set[Slot] = set()
    for event in events:
        if isinstance(event, Backward):
            slot = (event.accumulation_step, event.microbatch)
            arrived.add(slot)
            (unsharded if sharded else grad)[slot] = _Share()
        elif isinstance(event, Reduce) and event.impl not in SHARDING:
            grad = _joined(grad, event)
        elif isinstance(event, Reduce):
            joined, unsharded = _joined(unsharded, event), {}
            if is_partial(event):
                partial |= joined
            else:
                grad |= joined | _over_replicas(partial, event)
                partial = {}
        elif isinstance(event, ScaleGrads | AmpUnscale):
            unscaled = isinstance(event, AmpUnscale)
            factor = 1.0 if unscaled else 1.0 / event.divisor  # type: ignore[union-attr]
            grad = {s: _Share(one.factor * factor, one.groups, one.num_unscaled + unscaled) for s, one in grad.items()}
        elif isinstance(event, ZeroGrad):
            grad = {}
        elif isinstance(event, OptimizerStep):
            read = dict(grad)
    if read is None or not arrived:
        return None
    shares = list(read.values()) or [_Share()]
    if len({(one.groups, one.num_unscaled) for one in shares}) > 1:
        reasons.append("the contributions of one parameter were reduced over unequal groups of ranks")
        return None
    lost = _Share(0.0)
    factors = tuple(read.get(slot, lost).factor if slot in arrived else nan for slot in slots)
    return Way(factors, shares[0].groups, shares[0].num_unscaled)


def _joined(buffer: _Buffer, event: Reduce) -> _Buffer:
    factor = shards_factor(event) if is_partial(event) else nominal_factor(event)
    return _over(buffer, (event.group, event.replicate_group if event.all_reduced else ()), factor)


def _over_replicas(buffer: _Buffer, event: Reduce) -> _Buffer:
    """What earlier reductions left to one over the replicas."""
    return _over(buffer, (event.replicate_group,), replicas_factor(event))


def _over(buffer: _Buffer, over: Sequence[tuple[int, ...]], factor: float) -> _Buffer:
    """A buffer after a reduction. What was joined over a group before is there once on each of its ranks."""
    result = {}
    for slot, share in buffer.items():
        groups, times = set(share.groups), 1
        for group in over:
            if len(group) > 1:
                times *= len(group) if group in groups else 1
                groups.add(group)
        result[slot] = _Share(share.factor * factor * times, frozenset(groups), share.num_unscaled)
    return result

"""The norms of the gradients really seen, and what the norm of all of them is, whatever lies on which rank.

Every rank records the norm of what it holds of each gradient. Copies are counted once, distinct parts all. Where a
trace cannot tell copies from parts (plain tensors without a layout, matrices that are tied, summands that were never
added up) the norm is an interval, and nothing inside it is accused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import isfinite, prod, sqrt
from typing import Any

import msgspec
import numpy as np

from gradcheck_dist.events import Clip, Norms, PipelineStep, Reduce
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import ParamKey, StepData, param_key, read_scales
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run

SAME_COPY = {"float32": 1e-5, "float64": 1e-9, "float16": 2e-3, "bfloat16": 1e-2}
"""Relative difference of norms up to which two ranks hold copies of one gradient."""
TIED = 1e-7
"""Two whole matrices whose norms agree so closely are one matrix under two names."""
LARGE = {"float64": 0.0, "float32": 1e-9, "bfloat16": 1e-9, "float16": 2e-9}
"""Relative error of a norm of torch's CPU build per element of the largest tensor. Measured (randn): 6.5e-4 at 16.8
million float32 elements and 5.1e-3 at 67 million, 1.6e-2 at 16.8 million of float16; this allows twice as much, and
for float32 more: gradients are no randn, and torchtitan's debug model showed 1.3e-4 at 0.5 million."""
BASE = 2e-5


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent of a part in its parameter."""


class Part(msgspec.Struct, frozen=True, gc=False):
    """What one rank holds of one gradient. `box` is its place in the parameter, None where that is not known; `own` the
    name under which this rank has it, where it is tied to another."""

    key: ParamKey
    rank: int
    norm: float
    box: Box | None
    partial: bool
    whole: bool
    num_nonfinite: int
    dtype: str
    size: int
    own: ParamKey | None = None

    @property
    def square(self) -> float:
        return self.norm**2


@dataclass(frozen=True)
class Interval:
    """Between which values the norm of some gradients lies; `known` is False where parts of them were not seen."""

    low: float
    high: float
    known: bool = True

    def holds(self, value: float, tolerance: float) -> bool:
        return self.low * (1 - tolerance) <= value <= self.high * (1 + tolerance)

    @property
    def exact(self) -> bool:
        return self.high <= self.low * (1 + 1e-6)

    @property
    def middle(self) -> float:
        return sqrt(0.5 * (self.low**2 + self.high**2))


@dataclass(frozen=True)
class ClipCall:
    """A clip on one rank. `place` is equal for the same call on other ranks: its line, and how often it had run."""

    rank: int
    event: Clip
    parts: tuple[Part, ...]
    place: tuple[object, ...]

    @cached_property
    def tolerance(self) -> float:
        """What the user's own norm may be off by: rounded to the type it was computed in, and torch's error."""
        return own_error(self.parts, self.event.norm_dtype)


@dataclass
class StepNorms:
    """All norms of one step. `parts` holds one part for each rank and parameter: at its first clip, else at the step.

    `linked` are sets of ranks that train one model together; of `blind` ranks no norm was recorded. `axes` holds the
    groups of ranks along each axis that was seen: of a pipeline, of shards, of a kind of reduction.
    """

    clips: list[ClipCall] = field(default_factory=list)
    parts: dict[tuple[int, ParamKey], Part] = field(default_factory=dict)
    linked: list[frozenset[int]] = field(default_factory=list)
    blind: frozenset[int] = frozenset()
    axes: list[frozenset[frozenset[int]]] = field(default_factory=list)
    judged: list[Any] | None = None  # kept by clips.judge_clips

    def together(self, rank: int) -> frozenset[int]:
        """The ranks that train one model with this one."""
        return next((group for group in self.linked if rank in group), frozenset({rank}))

    def of_model(self) -> float | None:
        """The norm before any clip, all parts of the first rank's model together; None where it is not known exactly
        (summands, layouts that were not recorded)."""
        model = self.together(min((rank for rank, _ in self.parts), default=0))
        total = norm_of(part for (rank, _), part in self.parts.items() if rank in model)
        return total.middle if self.parts and not model & self.blind and total.known and total.exact else None


def step_norms(run: Run, data: StepData, coordinate: Mapping[int, int] | None = None) -> StepNorms:
    """Join the norms of a step with its clips. `coordinate`: the data coordinate of each rank; ranks that share one
    train one model."""
    keys: dict[int, dict[int, ParamKey]] = defaultdict(dict)
    for key, of_key in data.tracks.items():
        for rank, track in of_key.items():
            keys[rank][track.param.id] = key
    at: dict[tuple[int, int], list[Part]] = {}
    result = StepNorms()
    for rank, trace in run.ranks.items():
        clips = {event.seq for event in data.events.get(rank, ()) if isinstance(event, Clip)}
        scales = read_scales(data.events.get(rank, ()))
        held: set[ParamKey] = set()
        of_step = [norms for norms in trace.norms if norms.step == data.step]
        for norms in sorted(of_step, key=lambda one: one.seq not in clips):  # before values were clipped: others
            only = None if norms.seq in clips else held  # at the step the same again as at the clip
            at[rank, norms.seq] = found = _parts(trace, norms, keys[rank], only, scales.get(norms.seq, 1.0))
            for part in found:
                if part.key not in held:
                    held.add(part.key)
                    result.parts[rank, part.key] = part
    for rank, events in data.events.items():
        ran: dict[tuple[object, ...], int] = defaultdict(int)
        for event in events:
            if isinstance(event, Clip):
                line = (event.site.file, event.site.line) if event.site else ()
                place = (*line, ran[line])
                ran[line] += 1
                result.clips.append(ClipCall(rank, event, tuple(at.get((rank, event.seq), ())), place))
    shards = _shards(result.parts.values())
    result.linked = _linked(run, data, shards, coordinate or {})
    result.axes = _axes(data, shards)
    seen = {rank for rank, _ in result.parts}
    result.blind = frozenset(rank for rank in range(run.world_size) if rank not in seen)
    return result


def _parts(
    trace: RankTrace, norms: Norms, keys: Mapping[int, ParamKey], known: set[ParamKey] | None, scale: float
) -> list[Part]:
    """The rows of a record, without those of `known` parameters. `scale`: what an optimizer divides them by."""
    found: list[Part] = []
    if known is not None and known >= set(keys.values()):
        return found
    table = np.frombuffer(norms.rows, dtype="<i4").reshape(-1, 3).tolist()
    params, plans, rank = trace.params, trace.plans, trace.rank
    for (param_id, plan_id, num_nonfinite), norm in zip(table, np.frombuffer(norms.values).tolist(), strict=False):
        key, param = keys.get(param_id), params.get(param_id)
        if key is None or param is None or (known is not None and key in known):
            continue
        plan, box, whole, partial = plans.get(plan_id), None, False, False
        if plan is not None:
            partial = plan.partial
            if plan.offset is not None and plan.extent is not None:
                box, whole = (plan.offset, plan.extent), plan.extent == param.shape
        own, size = param_key(param), prod(param.shape)
        found.append(Part(key, rank, norm / scale, box, partial, whole, num_nonfinite, param.dtype, size, own))
    return found


def _shards(parts: Iterable[Part]) -> list[frozenset[int]]:
    """The ranks that hold parts of one parameter."""
    holders: dict[ParamKey, set[int]] = defaultdict(set)
    for part in parts:
        if part.box is not None and not part.whole:
            holders[part.key].add(part.rank)
    return [frozenset(ranks) for ranks in holders.values()]


def _axes(data: StepData, shards: Iterable[frozenset[int]]) -> list[frozenset[frozenset[int]]]:
    groups: dict[tuple[str, int], set[frozenset[int]]] = defaultdict(set)
    for ranks in shards:
        groups["shards", len(ranks)].add(ranks)
    for events in data.events.values():
        for event in events:
            if isinstance(event, PipelineStep | Reduce):
                groups[event.__class__.__name__, len(event.group)].add(frozenset(event.group))
            if isinstance(event, Reduce):
                groups["replicas", len(event.replicate_group)].add(frozenset(event.replicate_group))
    return sorted({frozenset(of_axis) for (_, size), of_axis in groups.items() if size > 1}, key=str)


def _linked(
    run: Run, data: StepData, shards: Iterable[frozenset[int]], coordinate: Mapping[int, int]
) -> list[frozenset[int]]:
    """Ranks of one mesh, of one pipeline, of one reduction, with the same tokens, or with parts of one parameter."""
    groups = [{rank for rank, own in coordinate.items() if own == one} for one in set(coordinate.values())]
    if run.axes is not None:
        return [frozenset(run.ranks)]
    groups += map(set, shards)
    for rank, events in data.events.items():
        groups.append({rank})
        for event in events:
            if isinstance(event, PipelineStep | Reduce):
                groups.append({rank, *event.group, *getattr(event, "replicate_group", ())} & set(run.ranks))
    merged: list[set[int]] = []
    for group in groups:
        touching = [known for known in merged if known & group]
        merged = [known for known in merged if not known & group] + [set(group).union(*touching)]
    return [frozenset(group) for group in merged]


def norm_of(parts: Iterable[Part]) -> Interval:
    """The norm of all gradients of which these are parts: copies once, distinct parts all."""
    by_key: dict[ParamKey, list[Part]] = defaultdict(list)
    for part in parts:
        by_key[part.key].append(part)
    low = high = 0.0
    known = True
    wholes: list[tuple[float, int]] = []
    for of_key in by_key.values():
        least, most, complete = _of_parameter(of_key)
        low, high, known = low + least, high + most, known and complete
        if most and most <= least * (1 + TIED):
            wholes.append((least, of_key[0].size))
    wholes.sort()
    for (one, size), (other, other_size) in pairwise(wholes):
        if size == other_size and other <= one * (1 + 2 * TIED):
            low -= one  # tied, and counted once or twice: both are done
    return Interval(sqrt(max(low, 0.0)), sqrt(high), known)


def _of_parameter(parts: list[Part]) -> tuple[float, float, bool]:
    """Bounds of one gradient's squared norm, and whether all of it was seen."""
    boxes: dict[Box | None, list[Part]] = {}
    total, finite, partial = 0.0, True, False
    for part in parts:
        finite = finite and not part.num_nonfinite and isfinite(part.norm)
        partial, total = partial or part.partial, total + part.norm
        boxes.setdefault(part.box, []).append(part)
    if not finite:
        return 0.0, 0.0, False
    if partial:
        return 0.0, total**2, True  # summands: the triangle inequality is all there is
    if None in boxes:
        return max(part.square for part in parts), sum(part.square for part in parts), True
    covered = sum(prod(box[1]) for box in boxes if box is not None)
    low = high = 0.0
    same = SAME_COPY.get(parts[0].dtype, SAME_COPY["float32"])
    for copies in boxes.values():
        least = most = copies[0].norm ** 2
        if len(copies) > 1:
            squares = [part.norm**2 for part in copies]
            least, most = squares[0], squares[0]
            if max(squares) <= min(squares) * (1 + same) ** 2:
                most *= len({part.own for part in copies})  # tied matrices may be counted once or each: both are done
            else:
                least, most = min(squares), sum(squares)
        low, high = low + least, high + most
    return low, high, covered == parts[0].size


def own_error(parts: Sequence[Part], norm_dtype: str = "") -> float:
    """Relative error that the user's own norm of these gradients may have."""
    kinds = {(part.dtype, part.size) for part in parts}
    dtypes = {dtype for dtype, _ in kinds} | {norm_dtype or "float32"}
    rounding = 2 * max(EPSILON.get(dtype, EPSILON["float32"]) for dtype in dtypes)
    return BASE + rounding + max((LARGE.get(dtype, 1e-9) * size for dtype, size in kinds), default=0.0)


def local_norm(parts: Iterable[Part]) -> float:
    """The norm of what lies on one rank."""
    return sqrt(sum(part.square for part in parts))

"""From traces to tracks: for each parameter and rank, the leaves that arrived and the points where it was sampled."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gradcheck_dist.events import (
    BEFORE,
    LEAF,
    AmpUnscale,
    Backward,
    ClipValue,
    Event,
    LossGradient,
    OptimizerStep,
    Param,
    Reduce,
    Samples,
    Wrapper,
)
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tied import beside, ties
from gradcheck_dist.trace.reader import RankTrace, decode_values
from gradcheck_dist.trace.run import Run

ParamKey = tuple[int, str]
"""(pipeline stage, -1 without one; fully qualified name): one parameter of the model, on whichever ranks it lies."""

Slot = tuple[int, int]
"""(accumulation step, microbatch)"""


@dataclass
class Values:
    """Sampled gradient values in the parameter's global sample space, shape (num_positions,); NaN where not held.

    `partial`: they are a summand, the gradient is the sum over the ranks `over`.
    """

    data: np.ndarray
    partial: bool = False
    over: tuple[int, ...] = ()


@dataclass
class Point:
    """A sample of the gradient buffer before or after an event."""

    seq: int
    role: int
    values: Values


@dataclass
class Track:
    """One parameter on one rank during one step."""

    param: Param
    rank: int
    dtype: str = "float32"
    leaves: dict[Slot, tuple[int, Values]] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    value_clip: tuple[int, int] | None = None

    def is_behind_value_clip(self, event: Event) -> bool:
        """Whether an event acted on gradients whose elements had been clamped, before the optimizer read them."""
        return self.value_clip is not None and self.value_clip[0] < event.seq < self.value_clip[1]


@dataclass
class StepData:
    """One optimizer step on all ranks. `events` are sorted by seq; `tracks[key][rank]`.

    `tied`: the other names under which a parameter lies on other pipeline stages; its tracks hold them all. `beside`:
    the other copy of a tied parameter where both lie on the same ranks, which keep their tracks apart.
    """

    step: int
    events: dict[int, list[Event]]
    param_sets: dict[int, dict[int, tuple[int, ...]]]
    tracks: dict[ParamKey, dict[int, Track]]
    complete: bool
    wrappers: dict[int, dict[int, Wrapper]] = field(default_factory=dict)
    tied: dict[ParamKey, list[ParamKey]] = field(default_factory=dict)
    beside: dict[ParamKey, ParamKey] = field(default_factory=dict)

    @cached_property
    def event_of(self) -> dict[int, dict[int, Event]]:
        """The events of each rank by their number; of several with one number the first."""
        return {rank: {event.seq: event for event in reversed(of_rank)} for rank, of_rank in self.events.items()}

    def params_of(self, rank: int, param_set: int) -> tuple[int, ...]:
        return self.param_sets[rank].get(param_set, ())


def param_key(param: Param) -> ParamKey:
    return (-1 if param.stage is None else param.stage, param.name)


def steps_of(run: Run) -> list[int]:
    """Steps in which at least one backward was recorded, ascending."""
    return sorted({e.step for trace in run.ranks.values() for e in trace.events if isinstance(e, Backward)})


def skipped_steps(run: Run) -> list[int]:
    """Steps in which a GradScaler found an overflow and left the optimizer out: there is nothing to judge."""
    overflowed = {
        e.step for trace in run.ranks.values() for e in trace.events if isinstance(e, AmpUnscale) and e.found_inf
    }
    stepped = {e.step for trace in run.ranks.values() for e in trace.events if isinstance(e, OptimizerStep)}
    return sorted(overflowed - stepped)


def step_data(run: Run, step: int) -> StepData:
    """Everything that the ranks recorded of one step."""
    events = {
        rank: sorted((e for e in trace.events if e.step == step), key=lambda e: e.seq)
        for rank, trace in run.ranks.items()
    }
    tracks: dict[ParamKey, dict[int, Track]] = defaultdict(dict)
    names = _distinct_names(run)
    for rank, trace in run.ranks.items():
        for track in _tracks(trace, step, events[rank]):
            tracks[names[rank, track.param.id]][rank] = track
    tied = _join_tied(tracks, ties(run, names))
    complete = all(any(isinstance(e, OptimizerStep) for e in of_rank) for of_rank in events.values())
    sets = {rank: trace.param_sets for rank, trace in run.ranks.items()}
    wrappers = {rank: trace.wrappers for rank, trace in run.ranks.items()}
    copies = {key: other for key, other in beside(run, names).items() if _got_gradients(tracks, (key, other))}
    return StepData(step, events, sets, dict(tracks), complete, wrappers, tied, copies)


def _join_tied(
    tracks: dict[ParamKey, dict[int, Track]], first: dict[ParamKey, ParamKey]
) -> dict[ParamKey, list[ParamKey]]:
    """Give the first of several copies the tracks of all, where all got gradients; which they are."""
    joined: dict[ParamKey, list[ParamKey]] = defaultdict(list)
    for copy, one in first.items():
        if _got_gradients(tracks, (copy, one)):
            tracks[one] = {**tracks[one], **tracks.pop(copy)}
            joined[one].append(copy)
    return dict(joined)


def _got_gradients(tracks: dict[ParamKey, dict[int, Track]], keys: Iterable[ParamKey]) -> bool:
    return all(any(track.leaves for track in tracks.get(key, {}).values()) for key in keys)


def _distinct_names(run: Run) -> dict[tuple[int, int], ParamKey]:
    """The key of each (rank, parameter id). Plain tensors of one name that began with unequal values are different
    parameters, unless a reduction combines them: ranks whose tensors began alike or are reduced together share one key,
    named after their first rank. A bias that began as zeros everywhere is as different as its module's weight. A rank
    that never has a loss is another stage of a pipeline by hand: its names are its own."""
    found: dict[ParamKey, dict[int, Param]] = defaultdict(dict)
    for rank, trace in sorted(run.ranks.items()):
        for param in trace.params.values():
            found[param_key(param)][rank] = param
    reduced, without_loss = _reduced_together(run), _without_loss(run)
    parts = {key: _parts(params, reduced[key], without_loss) for key, params in found.items()}
    names: dict[tuple[int, int], ParamKey] = {}
    for (stage, name), params in found.items():
        apart = parts[stage, name]
        weight = parts.get((stage, f"{name.removesuffix('bias')}weight"), [])
        if len(apart) == 1 and len(weight) > 1 and all(map(_is_zero, params.values())):
            apart = merge([{rank} for rank in params], [*weight, *reduced[stage, name]])
        for part in apart:
            own = name if len(apart) == 1 else f"{name} (as on rank {min(part)})"
            names |= {(rank, params[rank].id): (stage, own) for rank in part}
    return names


def _reduced_together(run: Run) -> dict[ParamKey, set[tuple[int, ...]]]:
    """Sets of ranks over which each parameter's gradient was reduced."""
    groups: dict[ParamKey, set[tuple[int, ...]]] = defaultdict(set)
    for trace in run.ranks.values():
        done = {
            (event.params, (*event.group, *event.replicate_group))
            for event in trace.events
            if isinstance(event, Reduce) and len(event.group) > 1
        }
        for params, group in done:
            for param in trace.param_sets.get(params, ()):
                if param in trace.params:
                    groups[param_key(trace.params[param])].add(group)
    return groups


def _without_loss(run: Run) -> set[int]:
    """Ranks that ran backward passes and never had a loss, where others had."""
    ranks = {rank for rank, trace in run.ranks.items() if any(isinstance(e, Backward) for e in trace.events)}
    having = {rank for rank, trace in run.ranks.items() if any(isinstance(e, LossGradient) for e in trace.events)}
    return ranks - having if having else set()


def _parts(params: dict[int, Param], reduced: Iterable[Iterable[int]], without_loss: set[int]) -> list[set[int]]:
    """Sets of ranks on which tensors of one name are one parameter."""
    plain = all(param.fingerprint is not None for param in params.values())
    alike: dict[object, set[int]] = defaultdict(set)
    for rank, param in params.items():
        alike[param.fingerprint if plain else None, param.stage is None and rank in without_loss].add(rank)
    return merge(list(alike.values()), reduced)


def merge(parts: list[set[int]], groups: Iterable[Iterable[int]]) -> list[set[int]]:
    """The parts, those that have ranks in one group joined."""
    if len(parts) > 1:
        for group in groups:
            met = [part for part in parts if not part.isdisjoint(group)]
            if len(met) > 1:
                parts = [part for part in parts if part.isdisjoint(group)] + [set[int]().union(*met)]
    return parts


def _is_zero(param: Param) -> bool:
    size = {"float64": 8, "float32": 4}.get(param.dtype, 2)
    return param.fingerprint == zlib.crc32(bytes(param.num_positions * size))


def _tracks(trace: RankTrace, step: int, events: list[Event]) -> Iterator[Track]:
    tracks = {id: Track(param, trace.rank) for id, param in trace.params.items() if param.requires_grad}
    slot_of = {e.seq: (e.accumulation_step, e.microbatch) for e in events if isinstance(e, Backward)}
    known: dict[tuple[int, int, int], Point] = {}
    for samples in trace.samples:
        if samples.step != step:
            continue
        for (seq, role, param_id, _), values in _rows(trace, samples):
            track = tracks.get(param_id)
            if track is None:
                continue
            if role != LEAF:
                # What was once rounded to a coarse type (summed in bfloat16, then copied to float32) stays so.
                if not track.points or EPSILON.get(samples.dtype, 0) > EPSILON.get(track.dtype, 0):
                    track.dtype = samples.dtype
                point = known.get((param_id, seq, role))
                if point is None:
                    point = known[param_id, seq, role] = Point(seq, role, values)
                    track.points.append(point)
                else:  # a gradient that lies in pieces, in several tensors
                    hole = np.isnan(point.values.data)
                    point.values = Values(np.where(hole, values.data, point.values.data), values.partial, values.over)
            elif seq in slot_of:
                slot = slot_of[seq]
                if slot in track.leaves:  # a split backward: the same contribution arrived in two passes
                    values = Values(track.leaves[slot][1].data + values.data, values.partial, values.over)
                track.leaves[slot] = (seq, values)
    for track in tracks.values():
        track.points.sort(key=lambda point: (point.seq, point.role))
        _end_at_value_clip(trace, track, events)
        yield track


def _end_at_value_clip(trace: RankTrace, track: Track, events: list[Event]) -> None:
    """Clamping every element is no scaling: what was there before stands for what the optimizer read."""
    mine = [
        event
        for event in events
        if isinstance(event, ClipValue | OptimizerStep) and track.param.id in trace.param_sets.get(event.params, ())
    ]
    clamp = next((event for event in mine if isinstance(event, ClipValue)), None)
    step = next((event for event in mine if isinstance(event, OptimizerStep) and clamp and event.seq > clamp.seq), None)
    if clamp is None or step is None:
        return
    if any(isinstance(event, Backward | Reduce) and clamp.seq < event.seq < step.seq for event in events):
        return  # clamped before it was complete: no state of it is a combination of contributions
    seen = [point.values for point in track.points if (point.seq, point.role) == (clamp.seq, BEFORE)]
    track.value_clip = (clamp.seq, step.seq)
    track.points = [point for point in track.points if not clamp.seq <= point.seq <= step.seq]
    track.points += [Point(step.seq, BEFORE, values) for values in seen[:1]]
    track.points.sort(key=lambda point: (point.seq, point.role))


def _rows(trace: RankTrace, samples: Samples) -> Iterator[tuple[tuple[int, int, int, int], Values]]:
    rows = np.frombuffer(samples.rows, dtype="<i4").reshape(-1, 4)
    data = decode_values(samples.dtype, samples.values)
    start = 0
    for seq, role, param_id, plan_id in rows.tolist():
        plan = trace.plans.get(plan_id)
        param = trace.params.get(param_id)
        if plan is None or param is None:
            return  # the tables are damaged: the lengths of this and all later rows are unknown
        held = data[start : start + plan.num_values]
        start += plan.num_values
        if plan.positions is None:
            full = held
        else:
            full = np.full(param.num_positions, np.nan)
            full[np.frombuffer(plan.positions, dtype="<i4")] = held
        yield (seq, role, param_id, plan_id), Values(full, plan.partial, plan.partial_over)

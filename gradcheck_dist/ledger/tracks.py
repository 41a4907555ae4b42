"""From traces to tracks: for each parameter and rank, the leaves that arrived and the points where it was sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gradcheck_dist.events import (
    BEFORE,
    LEAF,
    OWN_OPTIMIZER,
    AmpUnscale,
    Backward,
    Clip,
    ClipValue,
    Event,
    GradWrite,
    LossGradient,
    OptimizerStep,
    Param,
    ProbeStatus,
    Reduce,
    Samples,
    Wrapper,
)
from gradcheck_dist.ledger.grids import MIN_ON_GRID, on_grid
from gradcheck_dist.ledger.names import ParamKey as ParamKey
from gradcheck_dist.ledger.names import crossed, is_zero, names_and_sizes, plain_name
from gradcheck_dist.ledger.names import merge as merge
from gradcheck_dist.ledger.names import param_key as param_key
from gradcheck_dist.ledger.parted import Sizes
from gradcheck_dist.ledger.same_files import name_alike
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tied import beside, ties_and_doubts
from gradcheck_dist.trace.reader import RankTrace, decode_values
from gradcheck_dist.trace.run import Run

Slot = tuple[int, int]
"""(accumulation step, microbatch)"""

SAME_LEAF = 1e-5
"""Relative difference within which two ranks' gradients of a pass are one."""
MOST_WRITTEN = 4
"""Numbers that lines of the trainer's multiplied one gradient by, of which each may have moved a grid."""


@dataclass
class Values:
    """Sampled gradient values in the parameter's global sample space, shape (num_positions,); NaN where not held.

    `partial`: they are a summand, the gradient is the sum over the ranks `over`. `mean`: by so many that sum is
    divided, which `data` is already.
    """

    data: np.ndarray
    partial: bool = False
    over: tuple[int, ...] = ()
    mean: int = 1


@dataclass
class Point:
    """A sample of the gradient buffer before or after an event."""

    seq: int
    role: int
    values: Values


@dataclass
class Track:
    """One parameter on one rank during one step.

    `begun` and `left`: a few of its values when the step in which it was first seen began and when that was over, shape
    (count,); None where nobody looked. `exchanges`: how often which ranks had exchanged activations before its module
    was called, None where none did. `unwritten`: a reduction whose result never came to the gradient. `twice`: passes
    in which one gradient, bit by bit, arrived two times (a backward function that runs a backward pass of its own).
    """

    param: Param
    rank: int
    dtype: str = "float32"
    leaves: dict[Slot, tuple[int, Values]] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    value_clip: tuple[int, int] | None = None
    begun: np.ndarray | None = None
    left: np.ndarray | None = None
    exchanges: tuple[int, tuple[int, ...]] | None = None
    unwritten: Reduce | None = None
    twice: set[Slot] = field(default_factory=set)

    def is_behind_value_clip(self, event: Event) -> bool:
        """Whether an event acted on gradients whose elements had been clamped, before the optimizer read them. A scale
        that was taken out there did so to what was there before as well."""
        behind = self.value_clip is not None and self.value_clip[0] < event.seq < self.value_clip[1]
        return behind and not isinstance(event, AmpUnscale)


@dataclass
class StepData:
    """One optimizer step on all ranks. `events` are sorted by seq; `tracks[key][rank]`.

    `tied`: the other names under which a parameter lies on other pipeline stages; its tracks hold them all. `beside`:
    the other copy of a tied parameter where both lie on the same ranks, which keep their tracks apart. `perhaps_tied`:
    pairs that began alike and got gradients, and of which nothing else tells whether they are one. `sizes`: what
    values tell of the sizes of layers, whatever of them is trained. `frozen_parts`: of each parameter that nobody
    trains and of which ranks hold unlike tensors, the sets of ranks that hold one.
    """

    step: int
    events: dict[int, list[Event]]
    param_sets: dict[int, dict[int, tuple[int, ...]]]
    tracks: dict[ParamKey, dict[int, Track]]
    complete: bool
    wrappers: dict[int, dict[int, Wrapper]] = field(default_factory=dict)
    tied: dict[ParamKey, list[ParamKey]] = field(default_factory=dict)
    beside: dict[ParamKey, ParamKey] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    frozen_parts: list[list[frozenset[int]]] = field(default_factory=list)
    perhaps_tied: list[tuple[ParamKey, ParamKey]] = field(default_factory=list)

    @cached_property
    def event_of(self) -> dict[int, dict[int, Event]]:
        """The events of each rank by their number; of several with one number the first."""
        return {rank: {event.seq: event for event in reversed(of_rank)} for rank, of_rank in self.events.items()}

    def told(self, probe: str) -> list[str]:
        """What a probe tells that it did not see, in each of the step's events."""
        statuses = (event for of_rank in self.events.values() for event in of_rank if isinstance(event, ProbeStatus))
        return [event.reason for event in statuses if event.probe == probe and not event.active]

    def params_of(self, rank: int, param_set: int | None) -> tuple[int, ...]:
        return self.param_sets[rank].get(param_set, ()) if param_set is not None else ()


def steps_of(run: Run) -> list[int]:
    """Steps in which at least one backward was recorded, ascending."""
    return sorted({e.step for trace in run.ranks.values() for e in trace.events if isinstance(e, Backward)})


def skipped_steps(run: Run) -> list[int]:
    """Steps in which a GradScaler found an overflow and left the optimizer out: there is nothing to judge."""
    overflowed = {
        e.step for trace in run.ranks.values() for e in trace.events if isinstance(e, AmpUnscale) and e.found_inf
    }
    stepped = {e.step for trace in run.ranks.values() for e in _that_may_update(trace.events)}
    return sorted(overflowed - stepped)


def _that_may_update(events: Iterable[Event]) -> Iterator[OptimizerStep]:
    """Steps of optimizers, but for fused ones that were told of an overflow. An accelerator tells of that late."""
    told: AmpUnscale | None = None
    for event in sorted((e for e in events if isinstance(e, AmpUnscale | OptimizerStep)), key=lambda e: e.seq):
        if isinstance(event, AmpUnscale) and event.in_step and event.found_inf:
            told = event
        elif isinstance(event, OptimizerStep) and (
            told is None or (told.step, told.params) != (event.step, event.params)
        ):
            yield event


def blind_steps(run: Run) -> list[int]:
    """Steps with an optimizer's step in which losses went backward and no pass was seen to reach a parameter."""
    of_kind: dict[type[Event], set[int]] = defaultdict(set)
    for trace in run.ranks.values():
        for event in trace.events:
            of_kind[type(event)].add(event.step)
    return sorted((of_kind[LossGradient] & of_kind[OptimizerStep]) - of_kind[Backward])


def step_data(run: Run, step: int) -> StepData:
    """Everything that the ranks recorded of one step."""
    events = {
        rank: sorted((e for e in trace.events if e.step == step), key=lambda e: e.seq)
        for rank, trace in run.ranks.items()
    }
    _leave_to_torch(events)
    name_alike(events)
    tracks: dict[ParamKey, dict[int, Track]] = defaultdict(dict)
    names, sizes = names_and_sizes(run)
    names |= crossed(run, events, names)
    for rank, trace in run.ranks.items():
        for track in _tracks(trace, step, events[rank]):
            tracks[names[rank, track.param.id]][rank] = track
    join_born_alike(tracks)
    reached = {(rank, track.param.id) for of_rank in tracks.values() for rank, track in of_rank.items() if track.leaves}
    # What a rank built and left to others (the rest of a whole model) began as theirs did, and tells nothing of ties.
    trained = {at: key for at, key in names.items() if at in reached}
    sure, doubts = ties_and_doubts(run, trained)
    tied = _join_tied(tracks, sure)
    complete = all(any(isinstance(e, OptimizerStep) for e in of_rank) for of_rank in events.values())
    sets = {rank: trace.param_sets for rank, trace in run.ranks.items()}
    wrappers = {rank: trace.wrappers for rank, trace in run.ranks.items()}
    copies = {key: other for key, other in beside(run, trained).items() if _got_gradients(tracks, (key, other))}
    maybe = [pair for pair in doubts if _got_gradients(tracks, pair)]
    return StepData(
        step, events, sets, dict(tracks), complete, wrappers, tied, copies, sizes, _frozen_parts(run, names), maybe
    )


def _frozen_parts(run: Run, names: dict[tuple[int, int], ParamKey]) -> list[list[frozenset[int]]]:
    ranks: dict[ParamKey, dict[ParamKey, set[int]]] = defaultdict(lambda: defaultdict(set))
    for (rank, id), (stage, name) in names.items():
        if not run.ranks[rank].params[id].requires_grad:
            ranks[stage, plain_name(name)][stage, name].add(rank)
    return [list(map(frozenset, of_name.values())) for of_name in ranks.values() if len(of_name) > 1]


def _leave_to_torch(events: dict[int, list[Event]]) -> None:
    """Where an optimizer of torch's steps on some ranks and none on others, these are given its parameters: that they
    change is no step of theirs."""
    steps = {
        event.optimizer == OWN_OPTIMIZER for e in events.values() for event in e if isinstance(event, OptimizerStep)
    }
    if len(steps) > 1:
        for rank, of_rank in events.items():
            events[rank] = [e for e in of_rank if not (isinstance(e, OptimizerStep) and e.optimizer == OWN_OPTIMIZER)]


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


def join_born_alike(tracks: dict[ParamKey, dict[int, Track]]) -> None:
    """Join tensors that began as zeros and were told apart by their module's weight, where their gradients are the same
    on all ranks: a row-parallel layer's bias is a copy on each, and no shard."""
    parts: dict[ParamKey, list[ParamKey]] = defaultdict(list)
    for stage, name in tracks:
        if plain_name(name) != name:
            parts[stage, plain_name(name)].append((stage, name))
    for whole, keys in parts.items():
        first, *others = (list(tracks[key].values()) for key in keys)
        if (
            not others
            or whole in tracks
            or not all(is_zero(track.param) for of_key in (first, *others) for track in of_key)
        ):
            continue
        pairs = [(of_key, first) for of_key in others] + [(first, of_key) for of_key in others]
        if all(any(got_the_same(mine, other) for other in theirs) for ours, theirs in pairs for mine in ours):
            tracks[whole] = {rank: track for key in keys for rank, track in tracks.pop(key).items()}


def got_the_same(mine: Track, other: Track) -> bool:
    """Whether two ranks' passes gave one gradient, and any."""
    if mine.leaves.keys() != other.leaves.keys() or mine.param.shape != other.param.shape:
        return False
    found = False
    for slot, (_, values) in mine.leaves.items():
        size = float(np.nanmax(np.abs(values.data), initial=0.0))
        if not np.allclose(values.data, other.leaves[slot][1].data, rtol=0, atol=SAME_LEAF * size):
            return False
        found |= size > 0
    return found


def _got_gradients(tracks: dict[ParamKey, dict[int, Track]], keys: Iterable[ParamKey]) -> bool:
    return all(any(track.leaves for track in tracks.get(key, {}).values()) for key in keys)


def _tracks(trace: RankTrace, step: int, events: list[Event]) -> Iterator[Track]:
    seen = trace.param_values
    tracks = {
        id: Track(
            param,
            trace.rank,
            begun=seen.get((id, False)),
            left=seen.get((id, True)),
            exchanges=trace.exchanges.get(id),
        )
        for id, param in trace.params.items()
        if param.requires_grad
    }
    slot_of = {e.seq: (e.accumulation_step, e.microbatch) for e in events if isinstance(e, Backward)}
    known: dict[tuple[int, int, int], Point] = {}
    arrived: dict[int, set[str]] = defaultdict(set)  # types of contributions
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
                    point.values = replace(values, data=np.where(hole, values.data, point.values.data))
            elif seq in slot_of:
                arrived[param_id].add(samples.dtype)
                slot = slot_of[seq]
                if slot in track.leaves:  # a split backward: the same contribution arrived in two passes
                    if np.array_equal(track.leaves[slot][1].data, values.data) and _tells(values.data):
                        track.twice.add(slot)
                    values = replace(values, data=track.leaves[slot][1].data + values.data)
                track.leaves[slot] = (seq, values)
    written: dict[int, set[float]] = defaultdict(set)
    for event in events:
        if isinstance(event, GradWrite) and event.factor and event.params is not None:
            for param_id in trace.param_sets.get(event.params, ()):
                written[param_id].add(event.factor)
    scales = read_scales(events)
    for track in tracks.values():
        track.points.sort(key=lambda point: (point.seq, point.role))
        _divide_as_read(track, scales)
        _note_coarse(track, sorted(written[track.param.id])[:MOST_WRITTEN])
        if len(arrived[track.param.id]) == 1:
            _note_summed_as_arrived(track, *arrived[track.param.id])
        _end_at_value_clip(trace, track, events)
        yield track


def read_scales(events: Iterable[Event]) -> dict[int, float]:
    """By the number of each fused optimizer's step, the loss scale by which it divides gradients as it reads them."""
    scales: dict[int, float] = {}
    told: AmpUnscale | None = None
    for event in events:
        if isinstance(event, AmpUnscale) and event.in_step:
            told = event
        elif isinstance(event, OptimizerStep) and told is not None and told.scale:
            read = event.params == told.params or event.inside is not None
            scales |= {event.seq: told.scale} if read else {}
    return scales


def _divide_as_read(track: Track, scales: dict[int, float]) -> None:
    """Let samples of a gradient at a fused optimizer's step be what it makes of them as it reads."""
    for point in track.points:
        if point.role == BEFORE and point.seq in scales:
            values = point.values
            point.values = replace(values, data=values.data / scales[point.seq])


def _tells(values: np.ndarray) -> bool:
    return int(np.count_nonzero(np.nan_to_num(values))) >= MIN_ON_GRID


def _note_coarse(track: Track, written: Sequence[float] = ()) -> None:
    """A buffer whose elements all lie on the grid of a coarser type, as its contributions do not, was once rounded to
    it: compressed for a reduction and brought back. A line that multiplied it then, by a number that was `written`,
    moves the grid."""
    if track.dtype not in ("float32", "float64") or not track.leaves:
        return
    leaves = np.concatenate([values.data for _, values in track.leaves.values()])
    for dtype in ("float16", "bfloat16"):
        if on_grid(leaves, dtype):
            continue
        found = any(on_grid(point.values.data, dtype) for point in track.points)
        if found or any(on_grid(point.values.data, dtype, by) for point in track.points for by in written):
            track.dtype = dtype  # the coarser of two comes last


def _note_summed_as_arrived(track: Track, dtype: str) -> None:
    """Contributions of a coarser type may be added up in it before they come into a finer buffer, as those of a split
    backward are below FSDP: their sum is there, and as exact as that type."""
    coarse, fine = EPSILON.get(dtype, 0.0), EPSILON.get(track.dtype, 0.0)
    last = max((seq for seq, _ in track.leaves.values()), default=0)
    point = next((point for point in track.points if point.seq > last), None)
    if point is None or len(track.leaves) < 2 or coarse <= fine:
        return
    leaves = np.array([values.data for _, values in track.leaves.values()])
    told = np.isfinite(point.values.data) & np.isfinite(leaves).all(0)
    off = np.abs(point.values.data - leaves.sum(0))[told]
    size = len(leaves) * np.abs(leaves).sum(0)[told]
    if (off <= coarse * size).all() and not (off <= fine * size).all():
        track.dtype = dtype


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
    seen = [point for point in track.points if (point.seq, point.role) == (clamp.seq, BEFORE)][:1]
    read = [point.values for point in track.points if (point.seq, point.role) == (step.seq, BEFORE)][:1]
    clipped = any(isinstance(event, Clip) and clamp.seq < event.seq < step.seq for event in events)
    track.value_clip = (clamp.seq, step.seq)
    track.points = [point for point in track.points if not clamp.seq <= point.seq <= step.seq]
    for point in seen:
        values = None if clipped or not read else _unclamped(point.values, read[0], clamp.clip_value, track.dtype)
        track.points += [point] if values is not None else []
        track.points.append(Point(step.seq, BEFORE, values or point.values))
    track.points.sort(key=lambda point: (point.seq, point.role))


def _unclamped(before: Values, read: Values, most: float, dtype: str) -> Values | None:
    """What an optimizer would have read without a clip by value in front of what else was done to the gradient: each
    element times what became of it behind the clip. None where nothing was done there."""
    clamped = np.clip(before.data, -most, most)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(clamped != 0, read.data / clamped, 1.0)
    told = np.isfinite(factors)
    if (np.abs(factors[told] - 1) <= 2 * EPSILON.get(dtype, EPSILON["bfloat16"])).all():
        return None
    return replace(read, data=before.data * factors)


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
        mean = 1 if role == LEAF else plan.partial_mean  # a contribution is what went backward
        if mean > 1:
            held = held / mean
        if plan.positions is None:
            full = held
        else:
            full = np.full(param.num_positions, np.nan)
            full[np.frombuffer(plan.positions, dtype="<i4")] = held
        yield (seq, role, param_id, plan_id), Values(full, plan.partial, plan.partial_over, mean)

"""The account of one weight: the loss's share, what each recorded event did by its documentation, and what nobody did.

Along the way of a contribution from its loss to the gradient that the optimizer read,

    observed / expected  =  root  *  product of documented factors  *  product of measured gaps

A gap is what the gradient did between two neighbouring measurements beyond what was documented in between: 1 when
nothing happened behind the records' back. Steps name culprits by their event, gaps by the two events that enclose them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np

from gradcheck_dist.diagnosis.causes.averages import ask_for_average, average_again
from gradcheck_dist.diagnosis.causes.places import caller_of, kind_of, line_of
from gradcheck_dist.diagnosis.causes.routes import SAME, contains, origin, route
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.events import AmpUnscale, Backward, Clip, Event, OptimizerStep, Reduce, ScaleGrads, ZeroGrad
from gradcheck_dist.ledger.buffers import Entry, in_one_buffer
from gradcheck_dist.ledger.reductions import nominal_factor
from gradcheck_dist.ledger.replay import LEAF_ORDER
from gradcheck_dist.ledger.tracks import StepData, Track
from gradcheck_dist.ledger.transit import gain

NOTHING = 1e-9
"""Share of a gradient's largest weight that no measurement of float32 tells from none."""

Hand = tuple[object, ...]
Along = tuple[Hand, tuple[int, ...]]
SCALING = (Reduce, ScaleGrads, AmpUnscale, ZeroGrad)


@dataclass(frozen=True)
class Step:
    """A recorded event that multiplied the weight, be it by 1. `opaque`: by a factor that no documentation gives and
    that was measured. `like`: the step of another parameter whose records have the factor that was measured here."""

    event: Event
    rank: int
    factor: float
    opaque: bool = False
    like: Step | None = None

    @property
    def hand(self) -> Hand:
        """Equal for events that are one and the same line doing one and the same thing."""
        if self.like is not None:
            return self.like.hand
        event = self.event
        group, op = len(getattr(event, "group", ()) or ()), getattr(event, "op", None)
        if isinstance(event, Reduce) and event.replicate_group:
            group, op = group * len(event.replicate_group), op if group > 1 else event.replicate_op
        constant = nominal_factor(event) if isinstance(event, Reduce) else getattr(event, "divisor", None)
        constant = None if constant is None or constant != constant else round(constant, 12)
        return (type(event).__name__, op, group, caller_of(event), constant)

    @property
    def along(self) -> Along:
        """The hand and the dimension of a mesh along which it reduces: one line may go over several, one by one."""
        group: Sequence[int] = getattr(self.event, "group", None) or ()
        return self.hand, tuple(rank - group[0] for rank in group)


@dataclass(frozen=True)
class Gap:
    """A measured factor that no record accounts for. `start` None: the loss. `noise` is its relative standard error.

    `inside`: both measurements belong to one event, or to one backward pass: it is this event that did it. `in_flight`:
    it lies between two pipeline stages, before the gradient came to the parameter. `written`: what a line of the
    trainer's did in it besides, which the losses lack.
    """

    start: Event | None
    end: Event | None
    rank: int
    factor: float
    noise: float
    inside: bool
    in_flight: bool = False
    written: float = 1.0


@dataclass
class Account:
    """`leaf` is the backward in which the contribution arrived, `arrived` tells whether it came to the rank that holds
    the gradient at all, `by_hand` whether it came there from another rank although no reduction was recorded."""

    root: float
    steps: list[Step] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    arrived: bool = True
    leaf: Event | None = None
    by_hand: bool = False

    @cached_property
    def documented(self) -> float:
        """What the weight's ratio would be had only the recorded happened."""
        return self.root * prod(step.factor for step in self.steps)

    @cached_property
    def measured(self) -> bool:
        """Whether some of what is documented had to be measured."""
        return any(step.opaque for step in self.steps)

    @cached_property
    def factors(self) -> dict[Hand, list[float]]:
        """What each recorded hand did, time after time."""
        found: dict[Hand, list[float]] = {}
        for step in self.steps:
            found.setdefault(step.hand, []).append(step.factor)
        return found

    @cached_property
    def way(self) -> tuple[object, ...]:
        """Equal for weights that went through the same events, recorded and measured ones."""
        ends = tuple((gap.inside, *(event and (kind_of(event), line_of(event)) for event in (gap.start, gap.end)))
                     for gap in self.gaps)  # fmt: skip
        return (round(prod(step.factor for step in self.steps), 9), ends)

    @cached_property
    def doings(self) -> tuple[object, ...]:
        """Equal for weights to which the same was done."""
        return tuple((hand, tuple(factors)) for hand, factors in self.factors.items())


def account(data: StepData, held: Held, cell: Cell) -> Account:
    """The account of one cell. `arrived` is False when the contribution never came to the rank that holds it."""
    if (given_by := _given_by(data, held)) != held.rank:
        held = replace(held, rank=given_by)
    replay, column, holder = held.replay, cell.column, held.rank
    result = Account(cell.root_ratio)
    result.leaf = _leaf_event(data, held, origin(replay, column, holder), replay.basis.keys[column][1:])
    entries, leaf, result.arrived = path(data, held, column)
    result.by_hand = bool(entries) and entries[0].rank == holder != replay.basis.origin[column]
    hops = held.hops.get(column, ())
    result.gaps += [Gap(hop.left, hop.entered, hop.rank, hop.factor, hop.noise, False, in_flight=True) for hop in hops]
    reached = _walk(data, result, entries, cell.columns, leaf, result.root * gain(hops))
    if any(step.opaque and abs(step.factor) <= SAME for step in result.steps):
        result.arrived &= origin(replay, column, holder) == holder  # a hook that brought nothing from other ranks
    if held.clip_by_hand != 1 and _free(result, held.clip_by_hand):
        reached /= held.clip_by_hand
    ask_for_average(result)
    average_again(result, [entry.seq for entry in replay.history(holder) if entry.order == LEAF_ORDER])
    last = replay.final(holder)
    if last is not None and last.sampled and last.observed is None and reached and any(one is last for one in entries):
        # Its last state is known from another rank that holds the same, and from nothing before.
        start, end = result.gaps[-1].end if result.gaps else leaf, event_at(data, holder, last.seq)
        noise = cell.stderr * max(abs(cell.ratio), 1.0) / max(abs(cell.ratio), 1e-30)
        result.gaps.append(Gap(start, end, holder, cell.ratio / reached, noise, False))
    if last is not None and not last.sampled and result.arrived and result.documented != 0 and cell.ratio == 0:
        step = next((e for e in reversed(data.events[holder]) if isinstance(e, OptimizerStep)), None)
        start = result.gaps[-1].end if result.gaps else leaf
        result.gaps.append(Gap(start, step, holder, 0.0, 0.0, False))
    return result


def _given_by(data: StepData, held: Held) -> int:
    """The rank whose gradient this one reads: its own, or that of the rank to which a reduction brought all, where what
    both read is the same, bit by bit, in front of a clip: ranks whose norms differ by some other gradient each take a
    coefficient of their own. What happened to it happened there, before it was broadcast."""
    roots = [e.event.root for e in held.replay.history(held.rank) if isinstance(e.event, Reduce)]
    if not roots or roots[-1] in (None, held.rank):
        return held.rank
    root = roots[-1]
    tracks = data.tracks[held.param]
    read = [_read(data, tracks[rank]) for rank in (root, held.rank) if rank in tracks and tracks[rank].points]
    return root if len(read) == 2 and np.array_equal(read[0], read[1]) else held.rank


def _read(data: StepData, track: Track) -> np.ndarray:
    """What the first clip or the optimizer read."""
    clip = next((event.seq for event in data.events[track.rank] if isinstance(event, Clip)), None)
    points = [point for point in track.points if clip is None or point.seq <= clip]
    return (points or track.points)[-1].values.data


def _free(result: Account, clip: float) -> bool:
    """Take a clip that nobody recorded out of the gap in which it acted: the last before the optimizer or its clip.
    Whether there is one."""
    for index in reversed(range(len(result.gaps))):
        if isinstance(result.gaps[index].end, OptimizerStep | Clip):
            result.gaps[index] = replace(result.gaps[index], factor=result.gaps[index].factor / clip)
            return True
    return False


def path(data: StepData, held: Held, column: int) -> tuple[list[Entry], Event | None, bool]:
    """The entries of the replayed ledger that a contribution passes on its way to the optimizer's rank, in order; the
    event from which it starts; and whether it ever arrives there."""
    replay, holder = held.replay, held.rank
    start = origin(replay, column, holder)
    leaf = _leaf_event(data, held, start, replay.basis.keys[column][1:])
    entries, carried_over = route(replay, column, start, holder)
    entries = [entry for entry in entries if not _is_behind_step(data, entry)]
    if carried_over or holder == start:
        return entries, leaf, True
    emptied = any(isinstance(entry.event, ZeroGrad) for entry in entries)
    if not emptied or entries[-1].nominal[column] != 0:  # kept aside, it came back
        entries, leaf = _by_hand(data, held, column)
    return entries, leaf, bool(entries)


def _is_behind_step(data: StepData, entry: Entry) -> bool:
    """Whether a buffer was emptied when its rank's optimizers had all stepped: of what they do not read, that ends no
    step before its time."""
    if not isinstance(entry.event, ZeroGrad):
        return False
    steps = [event.seq for event in data.events[entry.rank] if isinstance(event, OptimizerStep)]
    return bool(steps) and entry.event.seq > max(steps)


def _walk(
    data: StepData, result: Account, entries: list[Entry], columns: Sequence[int], leaf: Event | None, arrived: float
) -> float:
    """Collect steps and gaps of a contribution that `arrived` at its leaf with a weight. Returns its ratio behind the
    last measurement and what is documented since. `columns`: its own and those of other ranks' summands, with which
    it weighs together.

    Only measured states bound a gap: what is carried on by documentation proves nothing.
    """
    start, start_rank = leaf, entries[0].rank if entries else 0
    measured, nominal, since, spread = arrived, 1.0, 1.0, 0.0
    opaque: Step | None = None
    kept: tuple[int, int, float] | None = None  # steps, gaps and the weight before the buffer was emptied
    num_before = len(result.steps)  # steps up to the last measurement
    for entry in entries:
        value = _together(entry.nominal, columns) / entry.clip
        if entry.event is not None:
            factor = _documented(entry.event, value / nominal if nominal else 1.0)
            if isinstance(entry.event, ZeroGrad) and kept is None:
                kept = len(result.steps), len(result.gaps), measured * since
            if np.isnan(factor):
                opaque = Step(entry.event, entry.rank, 1.0, opaque=True)
            elif result.by_hand and isinstance(entry.event, Reduce) and value == 0:
                pass  # what another rank's reduction does not bring, something else does, of which nothing was recorded
            elif isinstance(entry.event, SCALING):
                result.steps.append(Step(entry.event, entry.rank, factor))
                since *= factor
        if not np.isnan(value):
            nominal = value
        if not (entry.sampled and entry.observed is not None and entry.stderr is not None):
            continue
        seen = _together(entry.observed, columns) / entry.clip
        if np.isnan(seen):
            continue
        least = max(6 * _length(entry.stderr, columns), NOTHING * entry.largest) / entry.clip
        fallen = abs(measured * since - seen * arrived) > least * abs(arrived)
        if abs(seen) <= least and (fallen or measured * since == 0):
            seen = 0.0  # what is left of it is rounding, which the next measurement is no multiple of
            if kept is None and measured * since != 0:
                kept = len(result.steps), len(result.gaps), measured * since  # emptied, and nothing told of it
        ratio = seen * arrived
        end = event_at(data, entry.rank, entry.seq)
        if kept is not None and measured * since == 0 and ratio != 0 and contains(entry, columns[0]):
            # The trainer kept the gradient elsewhere and brought it back: nothing was lost when its buffer was emptied.
            # A scaler unscales what its optimizer reads, so it came back before that.
            unscaled = [step for step in result.steps[num_before:] if isinstance(step.event, AmpUnscale)]
            result.steps[kept[0] :], result.gaps[kept[1] :] = unscaled, []
            measured, since, kept = kept[2], prod(step.factor for step in unscaled), None
        factor = ratio / (measured * since) if measured * since else float(ratio != 0)
        if opaque is not None:
            result.steps.append(Step(opaque.event, opaque.rank, factor, opaque=True))
            nominal, factor, opaque = seen, 1.0, None
        size = max(abs(seen), 1e-30)
        noise = _own_noise(entry, columns, spread * abs(ratio / measured) if measured else 0.0) / size
        inside = start is not None and start_rank == entry.rank and same_doing(start, end)
        result.gaps.append(Gap(start, end, entry.rank, factor, noise, inside))
        start, start_rank, measured, since, num_before = end, entry.rank, ratio, 1.0, len(result.steps)
        spread = _length(entry.stderr, columns) / entry.clip
    return measured * since


def _own_noise(entry: Entry, columns: Sequence[int], before: float) -> float:
    """The standard error of what happened since the measurement before, whose own error `before` is already in it:
    what was inherited from there put both off alike."""
    if entry.own is None or entry.stderr is None:
        return 0.0
    own, total = _length(entry.own, columns) / entry.clip, _length(entry.stderr, columns) / entry.clip
    return float(np.sqrt(own**2 + max(before**2 - (total**2 - own**2), 0.0)))


def _together(weights: np.ndarray, columns: Sequence[int]) -> float:
    return float(weights[columns[0]]) if len(columns) == 1 else float(weights[list(columns)].sum())


def _length(errors: np.ndarray, columns: Sequence[int]) -> float:
    return float(errors[columns[0]]) if len(columns) == 1 else float(np.linalg.norm(errors[list(columns)]))


def _documented(event: Event, change: float) -> float:
    """By what an event multiplies a weight; of a reduction that is told by what the replay made of all its inputs."""
    if isinstance(event, ScaleGrads):
        return 1.0 / event.divisor
    if isinstance(event, AmpUnscale):
        return 1.0 / event.scale
    if isinstance(event, ZeroGrad):
        return 0.0
    return change if isinstance(event, Reduce) else 1.0


def same_doing(start: Event | None, end: Event | None) -> bool:
    """Whether two measurements belong to one event, or to a pass and what reduces inside of it."""
    if start is end:
        return True
    return (
        isinstance(start, Backward)
        and isinstance(end, Reduce)
        and (start.accumulation_step, start.microbatch) == (end.accumulation_step, end.microbatch)
        and end.impl != "all_reduce"
    )


def _leaf_event(data: StepData, held: Held, rank: int, slot: tuple[int, int]) -> Event | None:
    track = data.tracks[held.param].get(rank)
    if track is None or slot not in track.leaves:
        return None
    return event_at(data, rank, track.leaves[slot][0])


def event_at(data: StepData, rank: int, seq: int) -> Event | None:
    return data.event_of[rank].get(seq)


def _by_hand(data: StepData, held: Held, column: int) -> tuple[list[Entry], Event | None]:
    """A contribution of another rank that turns up without a recorded reduction: the entries from its first measured
    appearance on, and the last measured event of the holder before."""
    own, holder = held.replay.history(held.rank), held.rank
    first = next((i for i, entry in enumerate(own) if entry.sampled and contains(entry, column)), None)
    if first is None:
        return [], None
    leaves = [(seq, LEAF_ORDER) for seq, _ in data.tracks[held.param][holder].leaves.values()]
    before = [*leaves, *((entry.seq, entry.order) for entry in own[:first] if entry.sampled)]
    seen = max((at for at in before if at < (own[first].seq, own[first].order)), default=(-1, LEAF_ORDER))
    return in_one_buffer([entry for entry in own if (entry.seq, entry.order) > seen]), event_at(data, holder, seen[0])

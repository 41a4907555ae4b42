"""The first event after which a contribution's weight could no longer come right."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcheck_dist.diagnosis.cells import Cell, Held
from gradcheck_dist.events import Backward, Event, LossGradient, Reduce
from gradcheck_dist.ledger.contributions import Contribution, Contributions
from gradcheck_dist.ledger.replay import Entry, Replay
from gradcheck_dist.ledger.tracks import StepData

ON_TRACK = 1e-3
"""How near (relative) an intermediate weight must be to a known good value; widened by the cell's own tolerance."""


@dataclass(frozen=True)
class Culprit:
    """Where a weight left the track.

    `kind` is the kind of the event, or "loss" when it was wrong from the start. `absent`: everything was on track to
    the end, but something that should have followed (a reduction) did not; the event is the last backward.
    `unrecorded`: the change lies between `event` (still right) and `before`, done by nothing that was recorded.
    `factor` is the measured factor of the event or gap, `nominal` the documented one. A loss's `event` is its
    evaluation, `gradient` the backward in which its weight was seen.
    """

    kind: str
    rank: int
    event: Event | None
    nominal: float | None = None
    factor: float | None = None
    absent: bool = False
    unrecorded: bool = False
    before: Event | None = None
    gradient: LossGradient | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for culprits that are one and the same cause: same kind, operation and source line."""
        event, before = self.event, self.before
        return (
            self.kind,
            self.absent,
            self.unrecorded,
            getattr(event, "op", None),
            len(getattr(event, "group", ()) or ()),
            getattr(event, "site", None) and (event.site.file, event.site.line),  # type: ignore[union-attr]
            before is not None and type(before).__name__,
            before is not None and before.site is not None and (before.site.file, before.site.line),
        )


@dataclass(frozen=True)
class State:
    """The ratio of one contribution after an entry, measured there when `sampled`; `nominal` is its transfer from the
    leaf up to here by documented semantics."""

    entry: Entry | None
    ratio: float
    sampled: bool
    nominal: float


def path(replay: Replay, cell: Cell, holder: int) -> list[State]:
    """The ratio of a cell's contribution after everything that happened to it on its way to the holder.

    It begins at the loss (entry None). Between samples the last measured value is carried on by documented factors.
    """
    origin = replay.basis.origin[cell.column]
    entries = _route(replay, cell.column, origin, holder)
    states = [State(None, cell.root_ratio, True, 1.0)]
    anchor_ratio, anchor_nominal = cell.root_ratio, 1.0
    for entry in entries:
        nominal = float(entry.nominal[cell.column]) / entry.clip
        if entry.sampled and entry.observed is not None and not np.isnan(entry.observed[cell.column]):
            anchor_ratio = float(entry.observed[cell.column]) / entry.clip * cell.root_ratio
            anchor_nominal = nominal
            states.append(State(entry, anchor_ratio, True, nominal))
        else:
            carried = anchor_ratio * nominal / anchor_nominal if anchor_nominal else nominal * cell.root_ratio
            states.append(State(entry, carried, False, nominal))
    return states


def _route(replay: Replay, column: int, origin: int, holder: int) -> list[Entry]:
    """The entries that concern a contribution: on its origin until a reduction carried it over, then on the holder."""
    own = replay.history(holder)
    first = next((i for i, entry in enumerate(own) if _contains(entry, column)), None)
    if origin == holder:
        return _one_buffer(own[first:]) if first is not None else []
    before: list[Entry] = []
    elsewhere = replay.history(origin)
    start = next((i for i, entry in enumerate(elsewhere) if _contains(entry, column)), None)
    if start is not None:
        for entry in _one_buffer(elsewhere[start:]):
            if isinstance(entry.event, Reduce) and holder in entry.sources:
                break
            before.append(entry)
    return before + (_one_buffer(own[first:]) if first is not None else [])


def _contains(entry: Entry, column: int) -> bool:
    value = entry.nominal[column]
    if not np.isnan(value) and value != 0:
        return True
    return entry.sampled and entry.observed is not None and abs(entry.observed[column]) > ON_TRACK


def _one_buffer(entries: list[Entry]) -> list[Entry]:
    """Follow a contribution out of the unsharded buffer into the sharded one: a reduction is the only way over."""
    if not entries:
        return []
    chosen, name = [], entries[0].buffer
    for entry in entries:
        if isinstance(entry.event, Reduce):
            name = entry.buffer
        if entry.buffer == name:
            chosen.append(entry)
    return chosen


def good_values(held: list[Held]) -> list[float]:
    """Ratios through which contributions passed that came out right: 1, and this trainer's own convention (a loss
    that carries R/N because an average follows passes through R)."""
    values = [1.0]
    seen: set[tuple[object, ...]] = set()
    for one in held:
        if one.signature in seen:
            continue
        seen.add(one.signature)
        for cell in one.cells:
            if cell.right:
                for state in path(one.replay, cell, one.rank):
                    if state.ratio and not any(abs(state.ratio / value - 1) < ON_TRACK for value in values):
                        values.append(state.ratio)
    return values


def find(data: StepData, contributions: Contributions, held: Held, cell: Cell, good: list[float]) -> Culprit:
    """The culprit of one wrong cell."""
    states = path(held.replay, cell, held.rank)
    margin = max(ON_TRACK, 2 * cell.tolerance)
    on_track = [any(abs(state.ratio / value - 1) <= margin for value in good) for state in states]
    final_on_holder = len(states) > 1 and (states[-1].entry is not None and states[-1].entry.rank == held.rank)
    if not any(on_track):
        return blame_loss(contributions.by_key[cell.key], cell.root_ratio)
    last = max(index for index, good_here in enumerate(on_track) if good_here)
    if last == len(states) - 1 or not final_on_holder:
        rank = states[-1].entry.rank if states[-1].entry is not None else held.replay.basis.origin[cell.column]
        return Culprit("backward", rank, _last_backward(data, held, rank), factor=cell.ratio, absent=True)
    return _leaving(data, states, last)


def blame_loss(contribution: Contribution, factor: float) -> Culprit:
    """The weight was wrong from the start: where the loss was computed and normalised."""
    return Culprit(
        "loss",
        contribution.loss_rank or 0,
        contribution.loss or contribution.gradient,
        factor=factor,
        gradient=contribution.gradient,
    )


def repeats(held: Held, cell: Cell, culprit: Culprit) -> int:
    """How often events like the culprit acted on a contribution on its way."""
    event = culprit.event
    return sum(
        type(state.entry.event) is type(event) and state.entry.event.site == event.site
        for state in path(held.replay, cell, held.rank)
        if state.entry is not None and state.entry.event is not None and event is not None
    )


def _leaving(data: StepData, states: list[State], last: int) -> Culprit:
    """What happened between the last good state and the next one."""
    good, bad = states[last], states[last + 1]
    entry = bad.entry
    assert entry is not None
    factor = bad.ratio / good.ratio if good.ratio else None
    if entry.event is not None:
        nominal = _documented(states, last + 1)
        return Culprit(_kind(entry.event), entry.rank, entry.event, nominal=nominal, factor=factor)
    at = _event_at(data, entry.rank, entry.seq)
    if at is not None and good.entry is not None and good.entry.seq == entry.seq and good.entry.rank == entry.rank:
        nominal = _documented(states, last) if good.entry.event is not None else 1.0
        return Culprit(_kind(at), entry.rank, at, nominal=nominal, factor=(factor or 0.0) * (nominal or 1.0))
    previous = next(
        (
            event
            for event in (_event_of(data, state) for state in reversed(states[: last + 1]))
            if event is not None and event is not at
        ),
        None,
    )
    return Culprit(
        _kind(previous) if previous is not None else "loss",
        entry.rank,
        previous,
        nominal=1.0,
        factor=factor,
        unrecorded=True,
        before=at,
    )


def _documented(states: list[State], index: int) -> float | None:
    """By what the event at a state should have multiplied the contribution's weight, None when that is not known."""
    now, before = states[index].nominal, states[index - 1].nominal if index else 1.0
    return now / before if before and not np.isnan(now / before) else None


def _event_of(data: StepData, state: State) -> Event | None:
    if state.entry is None:
        return None
    return state.entry.event or _event_at(data, state.entry.rank, state.entry.seq)


def _event_at(data: StepData, rank: int, seq: int) -> Event | None:
    return next((event for event in data.events[rank] if event.seq == seq), None)


def _last_backward(data: StepData, held: Held, rank: int) -> Event | None:
    """The last pass in which the parameter's gradient arrived on a rank: where a reduction should have followed."""
    track = data.tracks[held.param].get(rank)
    if track is None:
        return None
    passes = [
        event
        for event in data.events[rank]
        if isinstance(event, Backward)
        and event.params is not None
        and track.param.id in data.params_of(rank, event.params)
    ]
    return passes[-1] if passes else None


def _kind(event: Event) -> str:
    kind = str(event.__struct_config__.tag)
    return "loss" if isinstance(event, LossGradient) else kind

"""The way of one contribution from its loss to the optimizer, read off the replayed ledger: a ratio an entry.

Between samples the last measured value is carried on by the documented factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.buffers import Entry, Replay

SAME = 1e-3


@dataclass(frozen=True)
class State:
    """The ratio of one contribution after an entry; `sampled` when it was measured there."""

    entry: Entry
    ratio: float
    sampled: bool


def way(replay: Replay, column: int, root_ratio: float, holder: int) -> list[State]:
    """The states of the contribution in `column` on its way to the rank that holds the parameter.

    Args:
        root_ratio: its weight at the loss / expected.
    """
    states: list[State] = []
    measured, nominal_there = root_ratio, 1.0
    for entry in _route(replay, column, holder):
        nominal = float(entry.nominal[column]) / entry.clip
        if entry.sampled and entry.observed is not None and not np.isnan(entry.observed[column]):
            measured, nominal_there = float(entry.observed[column]) / entry.clip * root_ratio, nominal
            states.append(State(entry, measured, True))
        else:
            carried = measured * nominal / nominal_there if nominal_there else nominal * root_ratio
            states.append(State(entry, carried, False))
    return states


def _route(replay: Replay, column: int, holder: int) -> list[Entry]:
    """On its origin until a reduction carried it over, then on the holder."""
    origin = replay.basis.origin[column]
    own = replay.history(holder)
    if origin == holder:
        return _from(own, column)
    before: list[Entry] = []
    for entry in _from(replay.history(origin), column):
        if isinstance(entry.event, Reduce) and holder in entry.sources:
            received = [e for e in own if isinstance(e.event, Reduce) and origin in e.sources]
            start = next((i for i, e in enumerate(own) if received and e is _receiving(received, column)), len(own))
            return before + _one_buffer(own[start:])
        before.append(entry)
    # No recorded reduction brought it: what the holder shows of it is all there is.
    return _from(own, column)


def _receiving(reductions: list[Entry], column: int) -> Entry:
    """The first reduction in which it arrived; of those of unknown arithmetic the first."""
    return next((entry for entry in reductions if entry.nominal[column] != 0), reductions[0])


def _from(entries: list[Entry], column: int) -> list[Entry]:
    start = next((i for i, entry in enumerate(entries) if _contains(entry, column)), None)
    return _one_buffer(entries[start:]) if start is not None else []


def _contains(entry: Entry, column: int) -> bool:
    value = entry.nominal[column]
    if not np.isnan(value) and value != 0:
        return True
    return entry.sampled and entry.observed is not None and bool(abs(entry.observed[column]) > SAME)


def _one_buffer(entries: list[Entry]) -> list[Entry]:
    """Out of the unsharded buffer into the sharded one a reduction is the only way."""
    chosen, name = [], entries[0].buffer if entries else ""
    for entry in entries:
        if isinstance(entry.event, Reduce):
            name = entry.buffer
        if entry.buffer == name:
            chosen.append(entry)
    return chosen

"""The way of one contribution from its loss to the optimizer, read off the replayed ledger: a ratio an entry.

Between samples the last measured value is carried on by the documented factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcheck_dist.diagnosis.causes.account import path
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.ledger.buffers import Entry
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.ledger.transit import gain


@dataclass(frozen=True)
class State:
    """The ratio of one contribution after an entry, `sampled` when it was measured there; `nominal` is the product of
    the documented factors up to there."""

    entry: Entry
    ratio: float
    sampled: bool
    nominal: float


def arrives_with(held: Held, cell: Cell) -> float:
    """The ratio with which a contribution comes to its parameter: the loss's, as stages before it handed it on."""
    return cell.root_ratio * gain(held.hops.get(cell.column, ()))


def way(data: StepData, held: Held, cell: Cell) -> list[State]:
    """The states of a cell's contribution on its way to the rank that holds the parameter."""
    states: list[State] = []
    came = arrives_with(held, cell)
    measured, nominal_there = came, 1.0
    for entry in path(data, held, cell.column)[0]:
        nominal = float(entry.nominal[cell.column]) / entry.clip
        if entry.sampled and entry.observed is not None and not np.isnan(entry.observed[cell.column]):
            measured, nominal_there = float(entry.observed[cell.column]) / entry.clip * came, nominal
            states.append(State(entry, measured, True, nominal))
        else:
            carried = measured * nominal / nominal_there if nominal_there else nominal * came
            states.append(State(entry, carried, False, nominal))
    return states

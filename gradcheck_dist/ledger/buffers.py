"""Gradient buffers as linear combinations, their states over time, and the history that a replay leaves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import hypot, isfinite

import numpy as np

from gradcheck_dist.events import Event, OptimizerStep, Reduce
from gradcheck_dist.ledger.leaves import Basis
from gradcheck_dist.ledger.solve import Solution

GONE, GONE_SIGMAS, VAGUE = 1e-3, 6.0, 0.05
"""A share of what a buffer held before that is no more than this, or than so many standard errors, is none, where these
are not more than that."""
ROUNDED = 4.0
"""Rounding of a sum of few numbers, in units of epsilon of all of them."""
MANY = 64
"""So many columns of a buffer are looked through for equal ones."""


@dataclass(frozen=True, slots=True)
class Column:
    """A summand of a buffer: values, the observed weights it stands for, its nominal coefficient. `foreign` is the root
    mean square of what was measured in it that is no combination of contributions, 0 where it is one. Buffers share
    columns: a reduction over n ranks brings n of them to n ranks."""

    data: np.ndarray
    weights: np.ndarray | None
    stderr: np.ndarray
    nominal: float
    foreign: float = 0.0

    def times(self, factor: float) -> Column:
        if factor == 1.0:
            return self
        return Column(self.data, self.weights, self.stderr, self.nominal * factor, self.foreign)


@dataclass
class Entry:
    """The state of a buffer on a rank after something happened to it. Vectors run over the columns of the basis.

    `event` is what happened, None at a mere sample. `observed` is None where it was not sampled or not solvable.
    `own` is the part of `stderr` that this measurement added to what it inherited from earlier ones.
    `clip` is the product of the recorded clip coefficients so far, `leftover` tells whether the buffer holds gradients
    of earlier steps, and `left_seen` that few elements were seen to be the sum of these and this step's. `made_of` are
    the measured summands that the records put together here, where too few elements of the sample lie on this rank to
    see them. `given` is what each reduction so far gave by the records, where these tell nothing of the sample.
    """

    rank: int
    seq: int
    order: int
    event: Event | None
    buffer: str
    nominal: np.ndarray
    observed: np.ndarray | None = None
    stderr: np.ndarray | None = None
    own: np.ndarray | None = None
    clip: float = 1.0
    sources: tuple[int, ...] = ()
    solution: Solution | None = None
    sampled: bool = False
    leftover: bool = False
    left_seen: bool = False
    made_of: tuple[Column, ...] = ()
    given: tuple[Column, ...] = ()

    @cached_property
    def largest(self) -> float:
        """The largest observed weight, without its sign. Asked for when the replay is over."""
        return float(np.nanmax(np.abs(self.observed))) if self.observed is not None else 0.0


@dataclass
class Buffer:
    nominal: np.ndarray
    columns: list[Column] = field(default_factory=list)
    clip: float = 1.0
    leftover: bool = False
    distinct: int = 0

    def scale(self, factor: float) -> None:
        self.nominal = self.nominal * factor
        self.columns = [column.times(factor) for column in self.columns]

    def clear(self) -> None:
        self.nominal = np.zeros_like(self.nominal)
        self.columns = []
        self.clip = 1.0
        self.leftover = False
        self.distinct = 0

    def add(self, other: Buffer, factor: float) -> None:
        added = factor * other.nominal
        if not isfinite(factor):  # what is not there stays so, even where the factor is not known
            added = np.where(other.nominal == 0, 0.0, added)
        self.nominal = self.nominal + added
        self.leftover |= other.leftover
        self.columns += [column.times(factor) for column in other.columns]
        if len(self.columns) > max(MANY, 2 * self.distinct):
            self._merge()

    def _merge(self) -> None:
        """Make one column of those that are one: a buffer that is reduced again in each pass, and of which nothing can
        be measured (a bias of three elements), would hold twice as many after each."""
        found: dict[tuple[int, int], Column] = {}
        for column in self.columns:
            key = id(column.data), id(column.weights)
            same = found.get(key)
            found[key] = column if same is None else replace(same, nominal=same.nominal + column.nominal)
        self.columns = list(found.values())
        self.distinct = len(found)

    def as_one(self) -> Column:
        """All of it, which is something, as one summand by the records."""
        data = sum((column.nominal * column.data for column in self.columns), np.zeros(()))
        stderr = np.sqrt(sum(((column.nominal * column.stderr) ** 2 for column in self.columns), np.zeros(())))
        known = [column.nominal * column.weights for column in self.columns if column.weights is not None]
        weights = np.sum(known, axis=0) if len(known) == len(self.columns) else None
        return Column(data, weights, stderr, 1.0)

    def find_leftover(self, solution: Solution) -> None:
        """See whether what was there before the step's first contribution is part of what a sample shows; where an
        earlier sample told, that stays."""
        shares = [
            GONE_SIGMAS * error <= VAGUE and abs(coefficient) <= max(GONE, GONE_SIGMAS * error)
            for column, coefficient, error in zip(self.columns, solution.coefficients, solution.stderr, strict=True)
            if column.weights is not None and not column.weights.any()
        ]
        self.leftover = self.leftover and not (shares and all(shares))

    def compare_leftover(self, values: np.ndarray, epsilon: float) -> bool:
        """The same by what the records say, where a sample has too few elements to be solved: one element is the sum
        with what was there before, or the sum without it. Returns whether it was seen to be a part."""
        if not self.leftover:
            return False
        before = [column for column in self.columns if column.weights is not None and not column.weights.any()]
        old = sum((column.nominal * column.data for column in before), np.zeros(()))
        whole = self.as_one().data
        near = ROUNDED * epsilon * sum((abs(column.nominal * column.data) for column in self.columns), np.zeros(()))
        told = abs(old) > 2 * near
        added, replaced = abs(values - whole) <= near, abs(values - (whole - old)) <= near
        if not told.any() or not np.isfinite(values).all():
            return False
        self.leftover = not bool(replaced[told].all())
        return bool(added.all())

    @property
    def foreign(self) -> float:
        """The root mean square of what is no combination of contributions, as documented events carried it on."""
        parts = [column.foreign * (column.nominal if isfinite(column.nominal) else 1.0) for column in self.columns]
        return hypot(*parts)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What happened on a rank from some entry on, in one buffer. `sent`: of each rank that a reduction in it went
    over, the index of the first such."""

    entries: list[Entry]
    sent: dict[int, int]


@dataclass
class Replay:
    """The history of one parameter on all ranks that hold it. `incomplete`: ranks a reduction needed and had not.
    `unwritten`: by rank, a reduction whose result never came to the gradient, which is no part of the history.
    `inside`: by rank, the numbers of reductions that an optimizer ran in its own step and whose results were seen.
    `waited`: ranks where a wrapper held what it had not reduced in an earlier step. `waits`: where it does when this
    one is over."""

    basis: Basis
    epsilon: float
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    incomplete: set[int] = field(default_factory=set)
    unwritten: dict[int, Event] = field(default_factory=dict)
    inside: dict[int, frozenset[int]] = field(default_factory=dict)
    waited: set[int] = field(default_factory=set)
    waits: set[int] = field(default_factory=set)
    _histories: dict[int, list[Entry]] = field(default_factory=dict)
    _stretches: dict[tuple[int, int], Stretch] = field(default_factory=dict)
    _brought: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def history(self, rank: int) -> list[Entry]:
        """What happened on a rank up to and with the last optimizer step, and reductions inside of that whose results
        were seen. Asked for when the replay is over."""
        found = self._histories.get(rank)
        if found is None:
            entries = self.entries.get(rank, [])
            steps = [index for index, entry in enumerate(entries) if isinstance(entry.event, OptimizerStep)]
            end = steps[-1] + 1 if steps else len(entries)
            inside = self.inside.get(rank, frozenset())
            behind = [index + 1 for index, entry in enumerate(entries) if entry.seq in inside]
            found = self._histories[rank] = entries[: max([end, *behind])]
        return found

    def stretch(self, rank: int, start: int) -> Stretch:
        """A rank's history from an index on, out of the unsharded buffer into the sharded one where a reduction leads
        over. Asked for each weight of each parameter, and the same for many: nobody changes it."""
        found = self._stretches.get((rank, start))
        if found is None:
            found = self._stretches[rank, start] = Stretch(in_one_buffer(self.history(rank)[start:]), {})
            for index, entry in enumerate(found.entries):
                if isinstance(entry.event, Reduce):
                    # What was sent to one rank only leaves no sources behind where it came from.
                    for other in entry.sources or ((entry.event.root,) if entry.event.root is not None else ()):
                        found.sent.setdefault(other, index)
        return found

    def brought(self, rank: int) -> dict[int, list[int]]:
        """By rank that gave to a reduction, the indices of those in this rank's history."""
        found = self._brought.get(rank)
        if found is None:
            found = self._brought[rank] = {}
            for index, entry in enumerate(self.history(rank)):
                for sender in dict.fromkeys(entry.sources) if isinstance(entry.event, Reduce) else ():
                    found.setdefault(sender, []).append(index)
        return found

    def final(self, rank: int) -> Entry | None:
        """The state that the optimizer read; the last state when the step never got there."""
        entries = [entry for entry in self.history(rank) if entry.buffer == "grad"]
        if len(entries) > 1 and isinstance(entries[-1].event, OptimizerStep):
            before = entries[-2]
            if before.sampled and before.seq == entries[-1].seq:
                return before
        return entries[-1] if entries else None


def in_one_buffer(entries: list[Entry]) -> list[Entry]:
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

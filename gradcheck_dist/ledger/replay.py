"""Replays the events of a step for one parameter: the nominal ledger, and beside it the observed one.

Every gradient buffer is at any time a linear combination of columns: sampled earlier states of buffers, and leaves that
arrived since. An event changes the coefficients by its documented semantics (nominal). At each sample the
coefficients are also measured by least squares, and the buffer becomes a single column again, whose observed weights
over contributions are composed from those of its columns. So each solve is small, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import numpy as np

from gradcheck_dist.events import (
    SHARDING,
    AmpUnscale,
    Backward,
    Clip,
    Event,
    GradWrite,
    LeftUnreduced,
    OptimizerStep,
    Reduce,
    ScaleGrads,
    ZeroGrad,
)
from gradcheck_dist.ledger.buffers import GONE_SIGMAS, Buffer, Column, Entry, Replay
from gradcheck_dist.ledger.composed import (
    Measured,
    is_another,
    is_multiple,
    is_unchanged,
    made_up_of,
    unless_others_would_do,
    where_not_known,
)
from gradcheck_dist.ledger.copies import Copies
from gradcheck_dist.ledger.inside_steps import seen_inside
from gradcheck_dist.ledger.leaves import Basis
from gradcheck_dist.ledger.reductions import (
    is_partial,
    nominal_factor,
    replicas_factor,
    rounds_of,
    shards_factor,
    summed_in,
)
from gradcheck_dist.ledger.solve import EPSILON, Solution
from gradcheck_dist.ledger.tracks import Point, StepData, Track

HEALTHY = 0.75
"""Residual in units of epsilon up to which nothing but rounding speaks (measured: 0.25 at most on healthy runs)."""
SELDOM = 1e-6
"""A run tries as many gradients as there are parameters, ranks, samples and steps; chance must hit none of them."""
AS_SAID = 1e-3
"""Difference up to which measured weights are those of a reading of the records."""
LEAF_ORDER, BEFORE_ORDER, EVENT_ORDER, AFTER_ORDER = range(4)


Op = tuple[int, int, object]  # (seq, order, leaf column | Event | Point)


def replay(data: StepData, tracks: dict[int, Track], basis: Basis) -> Replay:
    """Run all ranks' operations in an order in which every reduction finds its members ready."""
    epsilon = max((EPSILON.get(track.dtype, EPSILON["float32"]) for track in tracks.values()), default=2.0**-23)
    result = Replay(basis, epsilon)
    copies = Copies(result)
    machines = {rank: _Machine(data, track, copies) for rank, track in tracks.items()}
    result.unwritten = {rank: track.unwritten for rank, track in tracks.items() if track.unwritten is not None}
    result.inside = {rank: inside for rank, track in tracks.items() if (inside := seen_inside(data, track))}
    reductions = [op for machine in machines.values() for _, _, op in machine.ops if isinstance(op, Reduce)]
    result.epsilon = max([epsilon, *(EPSILON.get(summed_in(event), 0.0) for event in reductions)])
    while True:
        stopped = {rank: machine.run() for rank, machine in machines.items()}
        ready = {rank: event for rank, event in stopped.items() if event is not None}
        if not ready:
            waiting = ("unsharded", "partial")
            result.waits = {
                rank for rank, one in machines.items() if any(one.buffers[name].nominal.any() for name in waiting)
            }
            return result
        rounds = rounds_of(ready, {rank: machine.summands_on for rank, machine in machines.items()})
        whole = [members for members in rounds if members <= set(ready)]
        # Nobody is complete: a rank died, or its trace is missing. Go on with those that are there.
        chosen = max(whole, key=len) if whole else max(rounds, key=lambda members: len(members & set(ready)))
        result.incomplete |= {-1 - member for member in chosen if member < 0}
        _reduce({rank: machines[rank] for rank in chosen & set(ready)}, ready)


def _reduce(machines: dict[int, _Machine], ready: dict[int, Reduce]) -> None:
    events = {rank: ready[rank] for rank in machines}
    inputs = {rank: machines[rank].take_input(event) for rank, event in events.items()}
    kept = {rank: machines[rank].take_partial() for rank, event in events.items() if event.all_reduced}
    sums: dict[tuple[tuple[int, ...], float], Buffer] = {}  # all ranks of a group get the same one
    for rank, event in events.items():
        if event.root is not None and event.root != rank:
            machines[rank].left_out(event)
            continue
        replicas = event.replicate_group if event.all_reduced and event.replicate_group else (rank,)
        sources: set[int] = set()
        for replica in replicas:
            if replica in events:
                sources |= set(events[replica].group)
        sources = sources or set(event.group)
        if event.impl in SHARDING:
            sources |= {peer for source in sources & set(inputs) for peer in machines[source].summands_on}
        sources &= set(inputs)
        partials = [kept[replica] for replica in replicas if replica in kept]
        given, factor = tuple(sorted(sources)), shards_factor(event) if is_partial(event) else nominal_factor(event)
        if (given, factor) not in sums:
            sums[given, factor] = _summed([inputs[source] for source in given], factor, len(inputs[rank].nominal))
        machines[rank].receive(event, sums[given, factor], partials, given)


def _summed(inputs: list[Buffer], factor: float, num_columns: int) -> Buffer:
    total = Buffer(np.zeros(num_columns))
    for each in inputs:
        total.add(each, factor)
    first = inputs[0] if inputs else total
    if all(np.array_equal(each.nominal, first.nominal) and isclose(each.clip, first.clip) for each in inputs):
        total.clip = first.clip  # it was complete before
    return total


class _Machine:
    """The buffers of one parameter on one rank, driven through the operations that concern it."""

    def __init__(self, data: StepData, track: Track, copies: Copies) -> None:
        self.track, self.copies, self.result, self.basis = track, copies, copies.of, copies.of.basis
        self.ops = self._operations(data)
        reduces = [op for _, _, op in self.ops if isinstance(op, Reduce)]
        sharded = any(event.impl in SHARDING for event in reduces)
        self.buffers = {name: Buffer(np.zeros(len(self.basis))) for name in ("grad", "unsharded", "partial")}
        self.leaf_buffer = "unsharded" if sharded else "grad"
        # FSDP2 redistributes a Partial gradient to the parameter's layout, which sums it, before it reduces
        # (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _get_grad_inner_tensor).
        leaves = [values for _, values in track.leaves.values() if values.partial]
        self.summands_on = frozenset(rank for values in leaves for rank in values.over)
        self.entries = self.result.entries.setdefault(track.rank, [])
        self.left: Column | None = None  # what an earlier step left
        self.given: list[Buffer] = []  # what each reduction gave, by the records
        # What .grad holds if the last one's result was put elsewhere, as nominal weights.
        self.kept: list[np.ndarray] = []
        self.emptied = np.zeros(len(self.basis))  # what was emptied in this step, as nominal weights
        self.position = 0

    def _operations(self, data: StepData) -> list[Op]:
        rank, track = self.track.rank, self.track
        ops: list[Op] = [(seq, LEAF_ORDER, self.basis.of[(rank, *slot)]) for slot, (seq, _) in track.leaves.items()]
        unwritten = track.unwritten.seq if track.unwritten is not None else None
        points = [point for point in track.points if point.seq != unwritten]
        ops += [(point.seq, BEFORE_ORDER if point.role == 1 else AFTER_ORDER, point) for point in points]
        for event in data.events[rank]:
            params = getattr(event, "params", None)
            if params is None or isinstance(event, Backward | GradWrite) or event.seq == unwritten:
                continue
            if track.param.id in data.params_of(rank, params) and not track.is_behind_value_clip(event):
                ops.append((event.seq, EVENT_ORDER, event))
        return sorted(ops, key=lambda op: op[:2])

    def run(self) -> Reduce | None:
        """Go on until the end (None) or until a reduction needs other ranks."""
        while self.position < len(self.ops):
            seq, order, op = self.ops[self.position]
            if isinstance(op, Reduce):
                return op
            self.position += 1
            if isinstance(op, Point):
                self._sampled(op, order)
            elif isinstance(op, Event):
                self._apply(op)
            else:
                self._leaf(seq, int(op))  # type: ignore[call-overload]
        return None

    def _leaf(self, seq: int, column: int) -> None:
        buffer = self.buffers[self.leaf_buffer]
        unit = np.zeros(len(self.basis))
        unit[column] = 1.0
        buffer.nominal = buffer.nominal + unit
        self.kept = [each + unit for each in self.kept]
        buffer.columns.append(Column(self.basis.values[column], unit, np.zeros(len(self.basis)), 1.0))
        buffer.clip = 1.0  # a clip of what was not complete is a scaling like any other
        self._note(seq, LEAF_ORDER, None, self.leaf_buffer)

    def _apply(self, event: Event) -> None:
        buffer = self.buffers["grad"]
        if isinstance(event, ScaleGrads):
            buffer.scale(1.0 / event.divisor)
        elif isinstance(event, AmpUnscale):
            buffer.scale(1.0 / event.scale)
        elif isinstance(event, Clip):
            coefficient = event.coefficient ** (1 + event.repeated.count(self.track.param.id))
            buffer.scale(coefficient)
            buffer.clip *= coefficient
        elif isinstance(event, LeftUnreduced):
            return
        elif isinstance(event, ZeroGrad):
            self.emptied = self.emptied + buffer.nominal
            buffer.clear()
        self._note(event.seq, EVENT_ORDER, event, "grad")

    def take_input(self, event: Reduce) -> Buffer:
        """What this rank brings into a reduction."""
        name = "unsharded" if event.impl in SHARDING else "grad"
        buffer = self.buffers[name]
        taken = Buffer(buffer.nominal, list(buffer.columns), buffer.clip, buffer.leftover)
        self.kept = [taken.nominal, np.zeros(len(self.basis))] if event.impl == "reduce_scatter" else []
        if name == "unsharded":
            buffer.clear()
        return taken

    def take_partial(self) -> Buffer:
        """What earlier reductions left to the one over the replicas."""
        buffer = self.buffers["partial"]
        taken = Buffer(buffer.nominal, list(buffer.columns), buffer.clip, buffer.leftover)
        buffer.clear()
        return taken

    def left_out(self, event: Reduce) -> None:
        """Others got the result: what is left in this rank's buffer nobody documents."""
        self.position += 1
        self._note(event.seq, EVENT_ORDER, event, "grad")

    def receive(self, event: Reduce, result: Buffer, partials: list[Buffer], sources: tuple[int, ...]) -> None:
        """Replace (or, for a sharded gradient, add to) the buffer by the reduction's result. `partials`: what the
        replicas kept of earlier ones."""
        sharded, partial = event.impl in SHARDING, is_partial(event)
        target = self.buffers["partial" if partial else "grad"]
        self.given.append(result)
        if not sharded:
            target.clear()
        target.add(result, 1.0)
        target.clip = 1.0 if sharded else result.clip
        for earlier in partials if sharded and not partial else ():
            target.add(earlier, replicas_factor(event))
        self.position += 1
        self._note(event.seq, EVENT_ORDER, event, "partial" if partial else "grad", sources)

    def _note(self, seq: int, order: int, event: Event | None, name: str, sources: tuple[int, ...] = ()) -> Entry:
        buffer = self.buffers[name]
        entry = Entry(self.track.rank, seq, order, event, name, buffer.nominal, clip=buffer.clip, sources=sources)
        entry.leftover = buffer.leftover
        self.entries.append(entry)
        return entry

    def _sampled(self, point: Point, order: int) -> None:
        """Measure the buffer: which coefficients of its columns does the sample show?"""
        event = next((op for _, _, op in self.ops if isinstance(op, Event) and op.seq == point.seq), None)
        before_sharded_reduce = order == BEFORE_ORDER and isinstance(event, Reduce) and event.impl in SHARDING
        waited = event if isinstance(event, LeftUnreduced) else None
        name = (
            "partial" if waited and waited.over_shards else "unsharded" if before_sharded_reduce or waited else "grad"
        )
        buffer = self.buffers[name]
        entry = self._note(point.seq, order, None, name)
        entry.sampled = True
        first = all(point.seq <= seq for seq, _ in self.track.leaves.values())
        if order == BEFORE_ORDER and (event is None or waited) and first:
            # Before a step's first backward pass: contributions of no step. (Behind it: a reduction that broke off.)
            # What that pass brings has its number, and came later.
            zeros = np.zeros(len(self.basis))
            left = Column(point.values.data, zeros, zeros, 1.0)
            buffer.columns = [left, *buffer.columns]
            buffer.leftover = bool(np.nan_to_num(point.values.data).any())
            self.left = left if buffer.leftover and not waited else None
            if waited:
                self.result.waited.add(self.track.rank)
            entry.observed, entry.stderr, entry.leftover = zeros, zeros, buffer.leftover
            return
        weights, stderr, entry.own, solution = self._measure(point, buffer, entry)
        entry.leftover = buffer.leftover
        entry.observed, entry.stderr, entry.solution = weights, stderr, solution
        in_backward = event is None and order == AFTER_ORDER
        if weights is not None and self.kept and (in_backward or isinstance(event, OptimizerStep)):
            self._correct(entry, buffer, weights, in_backward)
        if weights is not None and self.emptied.any():
            self._put_back(entry, buffer, weights)
        errors = stderr if stderr is not None else np.zeros(len(self.basis))
        foreign = 0.0 if weights is not None else buffer.foreign if solution is None else solution.sigma
        if isinstance(event, Reduce) and event.root not in (None, self.track.rank):
            foreign = 0.0  # what a reduction to another rank leaves here is nobody's doing, and is not built on
        unseen = solution is None or solution.as_documented
        if unseen and all(column.weights is not None for column in buffer.columns):
            entry.made_of = tuple(buffer.columns)
        if weights is None and entry.made_of:
            return  # nothing was measured here: by the records it still is what it was made of
        buffer.columns = [self.copies.column(Column(point.values.data, weights, errors, 1.0, foreign))]

    def _correct(self, entry: Entry, buffer: Buffer, weights: np.ndarray, in_backward: bool) -> None:
        """Let the records say what a measurement shows of a reduction by hand into a tensor of the program's: whether
        .grad is what it was or was emptied, and whether an optimizer reads what all of them gave."""
        known = ~np.isnan(weights)  # nothing was measured of contributions that are zero in all sampled elements
        seen = weights[known]
        if in_backward:
            said = [each for each in self.kept if np.allclose(seen, each[known], rtol=0, atol=AS_SAID)]
            said = said if len(said) == 1 or known.all() else []
        else:
            total = sum((one.nominal for one in self.given), np.zeros(len(self.basis)))
            mine = total[known]
            share = float(seen @ mine) / float(mine @ mine) if mine.any() else 0.0
            said = [total] if share and np.allclose(seen, share * mine, rtol=0, atol=AS_SAID * abs(share)) else []
        if said and not np.allclose(seen, buffer.nominal[known], rtol=0, atol=AS_SAID):
            buffer.nominal = entry.nominal = said[0]

    def _put_back(self, entry: Entry, buffer: Buffer, weights: np.ndarray) -> None:
        """Let the records say that nothing was lost where a measurement shows all that was emptied, kept aside."""
        known = ~np.isnan(weights)
        whole = buffer.nominal + self.emptied
        seen, said = weights[known], whole[known]
        share = float(seen @ said) / float(said @ said) if self.emptied[known].any() else 0.0
        if share and np.allclose(seen, share * said, rtol=0, atol=AS_SAID * abs(share)):
            buffer.nominal = entry.nominal = whole
            self.emptied = np.zeros(len(self.basis))

    def _measure(
        self, point: Point, buffer: Buffer, entry: Entry
    ) -> Measured | tuple[None, None, None, Solution | None]:
        chain = self._solve(point, buffer.columns)
        rest = where_not_known(buffer.columns, point.values.data) if chain is not None and chain[3].fits else None
        if chain is not None and rest is not None:
            everything, told = self._everything(point, buffer)
            other = made_up_of(everything, rest, self.result.epsilon, len(self.basis), told)
            if other is not None and is_another(chain, other):
                return None, None, None, replace(other[3], fits=False)  # no weights are those of all of it
        if chain is not None and chain[3].residual <= HEALTHY * self.result.epsilon:
            buffer.find_leftover(chain[3])
            if (shared := self._as_arrived(point, buffer)) is not None:
                return shared
            if is_unchanged(buffer.columns, point.values.data):
                return chain
            brought = {column: self.basis.values[column] for column in self._arrived(point) if chain[0][column] == 0}
            return unless_others_would_do(chain, point.values.data, brought, self.result.epsilon)
        if chain is None and all(column.weights is not None for column in buffer.columns):
            entry.left_seen = buffer.compare_leftover(point.values.data, self.result.epsilon)
            return None, None, None, None  # too few elements for its few columns: more columns cannot help
        arrived = self._arrived(point)
        everything, told = self._everything(point, buffer)
        direct = self._solve(point, everything, told)
        if direct is None and not self._holds_all(buffer, arrived):
            return None, None, None, None  # too few elements to say that what others may have brought is not in it
        if any(one.leftover for one in self.given) and (added := self._added_up(point)) is not None:
            buffer.leftover = True  # what an earlier step left in .grad is a part of each
            return added
        foreign = buffer.foreign
        if direct is not None and foreign and direct[3].chance(foreign * direct[3].num_rows ** 0.5) > SELDOM:
            # It was no combination before: that it is one again is chance sooner than that somebody took the rest away.
            return None, None, None, replace(direct[3], fits=False, sigma=max(foreign, direct[3].sigma))
        if direct is not None and not direct[3].checked:
            direct = None  # so many contributions make up any few elements
        if direct is not None and direct[3].fits and (chain is None or direct[3].sigma < 0.5 * chain[3].sigma):
            buffer.leftover = False  # all of it came in this step: what was there before has been replaced
            return direct
        if chain is not None and chain[3].fits and (direct is not None or np.isnan(chain[3].coefficients).all()):
            buffer.find_leftover(chain[3])
            return chain  # nor do all contributions explain what is left of it: it is noise, as of what cancelled
        if self.left is not None and direct is not None:
            # Kept elsewhere (main_grad, which grows beside .grad), it comes back with what was added to it there. Where
            # something is taken away, the program computes it (variance reduction: a mean that the last step read).
            added = self._solve(point, [self.left, *everything], np.append(0.0, buffer.nominal[arrived]))
            known = added is not None and added[3].fits and added[3].checked and added[3].shows(0)
            if (
                added is not None
                and known
                and (np.nan_to_num(added[0]) >= -GONE_SIGMAS * np.nan_to_num(added[1])).all()
            ):
                buffer.leftover = True
                return added
        if direct is None:
            added = self._added_up(point)
            if added is not None:
                return added
            entry.given = tuple(one.as_one() for one in self.given if one.columns) if len(self.given) > 1 else ()
        solution = chain[3] if chain is not None else direct[3] if direct is not None else None
        return None, None, None, solution

    def _as_arrived(self, point: Point, buffer: Buffer) -> Measured | None:
        """What an optimizer reads behind reductions into tensors of the program's, where it may as well be the sum of
        these as a multiple of the last one: passes on one batch give the same each time, and share it alike."""
        if not (self.kept and len(buffer.columns) == 1):
            return None
        if not any(isinstance(op, OptimizerStep) and op.seq == point.seq for _, _, op in self.ops):
            return None
        earlier = [one.as_one().data for one in self.given[:-1] if one.columns]
        if not earlier or not all(is_multiple(point.values.data, each, self.result.epsilon) for each in earlier):
            return None
        everything, _ = self._everything(point, buffer)
        given = np.any([one.nominal != 0 for one in self.given], axis=0).astype(float)
        shared = self._solve(point, everything, given[self._arrived(point)])
        return shared if shared is not None and shared[3].fits and shared[3].checked else None

    def _added_up(self, point: Point) -> Measured | None:
        """What was added up elsewhere (a shard beside .grad): reductions gave fewer sums than contributions are."""
        given = [one.as_one() for one in self.given if one.columns]
        added = self._solve(point, given, np.ones(len(given))) if len(self.given) > 1 else None
        return added if added is not None and added[3].fits and added[3].checked else None

    def _everything(self, point: Point, buffer: Buffer) -> tuple[list[Column], np.ndarray]:
        """The contributions that can be in a buffer by now, as columns, and what its records say of these."""
        units, none, arrived = np.eye(len(self.basis)), np.zeros(len(self.basis)), self._arrived(point)
        found = [Column(self.basis.values[column], units[column], none, 1.0) for column in arrived]
        return found, buffer.nominal[arrived]

    @staticmethod
    def _holds_all(buffer: Buffer, arrived: list[int]) -> bool:
        """Whether every contribution that can be in a buffer is in one of the columns it is known to be made of."""
        held = [column.weights[arrived] != 0 for column in buffer.columns if column.weights is not None]
        return bool(held) and bool(np.any(held, axis=0).all())

    def _arrived(self, point: Point) -> list[int]:
        """The contributions that can be in a buffer by now: what has not happened yet must not explain it."""
        rank, leaves = self.track.rank, self.track.leaves
        latest = max((slot[0] for slot, (seq, _) in leaves.items() if seq <= point.seq), default=None)
        return sorted(
            {
                column
                for (owner, k, m), column in self.basis.of.items()
                if (leaves[k, m][0] <= point.seq if owner == rank else latest is None or k <= latest)
            }
        )

    def _solve(self, point: Point, columns: list[Column], documented: np.ndarray | None = None) -> Measured | None:
        if documented is None:
            return self.copies.measured(columns, point.values.data)
        return made_up_of(columns, point.values.data, self.result.epsilon, len(self.basis), documented)

"""One judged step for the screens: what each rank did when, and how a weight came to be, event by event."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gradcheck_dist.diagnosis.finding import Finding, FirstEvent
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.steps.units import by_contribution
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.events import (
    AmpUnscale,
    Event,
    GradWrite,
    Loss,
    LossGradient,
    Reduce,
    ScaleGrads,
    ZeroGrad,
)
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.reductions import nominal_factor
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.reports.timeline import duration_ns
from gradcheck_dist.tui.grid import WeightGrid, param_grid
from gradcheck_dist.tui.lanes import LETTERS, Lane, Mark, lanes_of
from gradcheck_dist.tui.scale import distance
from gradcheck_dist.tui.way import State, arrives_with, way


@dataclass(frozen=True)
class Stop:
    """One event on a contribution's way to the optimizer: its ratio before and after, and how it is known.

    `nominal` is the factor that the event has by its documentation; `measured` what the samples around it show.
    """

    rank: int
    seq: int
    event: Event | None
    before: float
    after: float
    sampled: bool
    nominal: float | None

    @property
    def measured(self) -> float | None:
        return self.after / self.before if self.sampled and self.before else None


@dataclass(frozen=True)
class ParamLine:
    """A parameter over all its holders: the ratio farthest from 1, the sampled norm, or why it is not known."""

    key: ParamKey
    unit: str
    ratio: float | None
    norm: float | None
    num_cells: int
    num_unknown: int
    reason: str
    right: bool


@dataclass(frozen=True)
class StepView:
    """Everything about one step."""

    verdict: StepVerdict
    tolerance: float = 1e-4
    _paths: dict[tuple[int, int], list[Stop]] = field(default_factory=dict, compare=False)

    @property
    def step(self) -> int:
        return self.verdict.context.step

    @cached_property
    def start_ns(self) -> int:
        starts = [event.t_ns - duration_ns(event) for event in self._timed()]
        return min(starts, default=0)

    def _timed(self) -> Iterator[Event]:
        for events in self.verdict.data.events.values():
            yield from (event for event in events if type(event) in LETTERS)

    @cached_property
    def culprits(self) -> dict[tuple[int, int], FirstEvent]:
        """The findings' first events by rank and seq."""
        events = [finding.first_event for finding in self.verdict.findings if finding.first_event is not None]
        return {(event.rank, event.seq): event for event in events}

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        return lanes_of(self.verdict.data, self.start_ns, self.culprits)

    @cached_property
    def timed(self) -> bool:
        """Whether single events have times of their own, which in columns they have not."""
        return any(len({event.t_ns for event in of_rank}) > 1 for of_rank in self.verdict.data.events.values())

    @cached_property
    def marks(self) -> dict[tuple[int, int], Mark]:
        return {(mark.rank, mark.seq): mark for lane in self.lanes for mark in lane.marks}

    @cached_property
    def units(self) -> dict[ParamKey, str]:
        return self.verdict.units

    @cached_property
    def held_by(self) -> dict[tuple[ParamKey, int], Held]:
        return {(held.param, rank): held for held in self.verdict.held for rank in held.ranks}

    def param_id(self, param: ParamKey, rank: int) -> int | None:
        track = self.verdict.data.tracks.get(param, {}).get(rank)
        return track.param.id if track is not None else None

    def concerns(self, mark: Mark, param: ParamKey | None) -> bool:
        """Whether an event is on the path of a parameter."""
        if param is None or mark.params is None:
            return True
        return self.param_id(param, mark.rank) in mark.params

    @cached_property
    def params(self) -> tuple[ParamLine, ...]:
        of_param: dict[ParamKey, list[Held]] = {}
        for held in self.verdict.held:
            of_param.setdefault(held.param, []).append(held)
        return tuple(self._param_line(key, helds) for key, helds in sorted(of_param.items()))

    def _param_line(self, key: ParamKey, helds: list[Held]) -> ParamLine:
        cells = [cell for held in helds for cell in by_contribution(held)]
        worst = max(cells, key=lambda cell: distance(cell.ratio), default=None)
        return ParamLine(
            key=key,
            unit=self.units.get(key, ""),
            ratio=worst.ratio if worst is not None else None,
            norm=self._norm(key),
            num_cells=len(cells),
            num_unknown=sum(held.num_unknown for held in helds),
            reason=next((held.reason for held in helds if held.reason), ""),
            right=all(cell.right for cell in cells),
        )

    def _norm(self, key: ParamKey) -> float | None:
        """The norm that the optimizer saw, estimated from the sampled elements of the first holder."""
        for track in self.verdict.data.tracks.get(key, {}).values():
            if track.points:
                values = track.points[-1].values.data
                known = values[~np.isnan(values)]
                total = math.prod(track.param.shape)
                if len(known):
                    return float(np.linalg.norm(known)) * math.sqrt(total / max(track.param.num_positions, 1))
        return None

    @cached_property
    def param_grid(self) -> WeightGrid:
        """The weights by single parameters, made when it is first asked for."""
        return param_grid(self.verdict, self.tolerance)

    def cell(self, param: ParamKey, holder: int, key: ContributionKey) -> Cell | None:
        """A contribution's weight; of several summands of its gradient (tensor parallel ranks) the first."""
        held = self.held_by.get((param, holder))
        return next((cell for cell in held.cells if cell.key == key), None) if held is not None else None

    def stops(self, param: ParamKey, holder: int, key: ContributionKey) -> list[Stop]:
        """The way of one contribution into one parameter's gradient on one rank, event by event."""
        held, cell = self.held_by.get((param, holder)), self.cell(param, holder, key)
        return self._way(held, cell) if held is not None and cell is not None else []

    def _way(self, held: Held, cell: Cell) -> list[Stop]:
        cached = self._paths.get((id(held), cell.column))
        if cached is None:
            states = way(self.verdict.data, held, cell)
            cached = self._paths[id(held), cell.column] = self._stops(states, held, cell)
        return cached

    def _stops(self, states: list[State], held: Held, cell: Cell) -> list[Stop]:
        stops = self._at_the_loss(cell.root_ratio, cell.key)
        groups: list[list[State]] = []
        for state in states:
            last = groups[-1][-1].entry if groups else None
            if last is not None and (last.rank, last.seq) == (state.entry.rank, state.entry.seq):
                groups[-1].append(state)
            else:
                groups.append([state])
        before, named = arrives_with(held, cell), 1.0
        for group in groups:
            entry = group[-1].entry
            event = self._event(entry.rank, entry.seq)
            first = group[0]
            # A sample before the event measures what happened until then, not the event itself.
            if len(group) > 1 and first.sampled and first.entry.event is None:
                before = first.ratio
            after, sampled = group[-1].ratio, group[-1].sampled
            nominal = documented(event)
            if nominal is not None and named:  # a sum of what is summed already doubles it, and that is documented too
                nominal = group[-1].nominal / named
            stops.append(Stop(entry.rank, entry.seq, event, before, after, sampled, nominal))
            before, named = after, group[-1].nominal
        return stops

    def _at_the_loss(self, root: float, key: ContributionKey) -> list[Stop]:
        """The evaluation of the loss, and its gradient, in which the weight was seen."""
        contribution = self.verdict.contributions.by_key.get(key)
        if contribution is None:
            return []
        rank = contribution.loss_rank if contribution.loss_rank is not None else key[0]
        loss, gradient = contribution.loss, contribution.gradient
        stops = [Stop(rank, loss.seq, loss, 1.0, root, True, None)] if loss is not None else []
        if gradient is not None:
            stops.append(Stop(rank, gradient.seq, gradient, root if stops else 1.0, root, True, 1.0))
        return stops

    def _event(self, rank: int, seq: int) -> Event | None:
        mark = self.marks.get((rank, seq))
        return mark.event if mark is not None else None

    def ledger_at(self, param: ParamKey, holder: int, at: Stop) -> list[tuple[Cell, float | None]]:
        """Every contribution's ratio at the moment right after `at`; None where it has not arrived yet. A summand that
        never arrives has the ratio with which it ends from the start."""
        held = self.held_by.get((param, holder))
        if held is None:
            return []
        now = at.event.t_ns if at.event is not None else 0
        result: list[tuple[Cell, float | None]] = []
        for cell in held.cells:
            ratio = None
            stops = self._way(held, cell)
            lost = all(isinstance(stop.event, Loss | LossGradient) for stop in stops)
            for stop in stops:
                same = stop.rank == at.rank
                if stop.seq <= at.seq if same else (stop.event is not None and stop.event.t_ns <= now):
                    ratio = cell.ratio if lost else stop.after
            result.append((cell, ratio))
        return result

    def first_wrong(self, finding: Finding) -> tuple[ParamKey, int, ContributionKey] | None:
        """A cell that shows a finding, if possible one that passes through its culprit."""
        units, event = set(finding.units), finding.first_event
        fallback = None
        for held in self.verdict.held:
            if held.rank not in finding.ranks:
                continue
            mine = self.units.get(held.param) in units or len(units) != 1
            for cell in held.cells:
                if cell.right:
                    continue
                found = (held.param, held.rank, cell.key)
                if mine and event is not None:
                    ways = self.stops(*found)
                    if any((stop.rank, stop.seq) == (event.rank, event.seq) for stop in ways):
                        return found
                fallback = fallback or found
        return fallback


def documented(event: Event | None) -> float | None:
    """The factor that an event has by its documentation; None when nothing is known."""
    if isinstance(event, Reduce):
        factor = nominal_factor(event)
        return None if math.isnan(factor) else factor
    if isinstance(event, ScaleGrads):
        return 1.0 / event.divisor if event.divisor else None
    if isinstance(event, AmpUnscale):
        return 1.0 / event.scale if event.scale else None
    if isinstance(event, GradWrite):
        return event.factor
    if isinstance(event, ZeroGrad):
        return 0.0
    return 1.0

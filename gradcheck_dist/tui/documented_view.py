"""A step whose weights were not measured: what its recorded operations do by their documentation.

Rows are ranks, columns their own contributions: by documentation, each reaches every holder alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import msgspec
import numpy as np

from gradcheck_dist.diagnosis.finding import Finding, FirstEvent
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.weights.context import step_context
from gradcheck_dist.events import AnyEvent, Event, Loss, LossGradient, Reduce, ScaleGrads, StepColumns, StepShape
from gradcheck_dist.ledger.contributions import collect
from gradcheck_dist.ledger.picked_losses import picked_apart
from gradcheck_dist.ledger.strangers import strangers
from gradcheck_dist.ledger.summed_losses import summed_losses
from gradcheck_dist.ledger.tracks import step_data
from gradcheck_dist.stream.findings import cells_of
from gradcheck_dist.stream.summaries import Block, Blocks, KnownShapes
from gradcheck_dist.stream.watch import expected_weight, find_setting
from gradcheck_dist.trace.columns import ColumnWriter
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run
from gradcheck_dist.tui.grid import Entry, WeightGrid, fill
from gradcheck_dist.tui.step_view import StepView

OWN = -1
"""Stands for the data rank in the key of a contribution that is the row's own."""
MAX_LANES = 64
"""Ranks whose events are shown: those of the finding, and the first ones."""


@dataclass(frozen=True)
class Meant:
    """What the step's gradient is meant to be, and how that is known."""

    objective: str
    objective_from: str


def lanes_of(ranks: Sequence[int], findings: Sequence[Finding]) -> list[int]:
    """The ranks whose events are shown."""
    first = [finding.first_event.rank for finding in findings if finding.first_event is not None]
    accused = [rank for finding in findings for rank in finding.ranks]
    return list(dict.fromkeys([rank for rank in [*first, *accused[: MAX_LANES // 2], *ranks] if rank in ranks]))[
        :MAX_LANES
    ]


def documented_view(
    run: Run, lanes: Sequence[int], step: int, findings: Sequence[Finding], meant: Meant, tolerance: float
) -> tuple[StepView, WeightGrid]:
    """A step of `run`, which holds events of `lanes`, and every rank's own."""
    shown = Run(run.path, run.manifest, {rank: run.ranks[rank] for rank in lanes}, list(run.problems))
    data = step_data(shown, step)
    contributions = collect(data.events, shown.same_data, strangers(data), summed_losses(data), picked_apart(data))
    context = step_context(shown, step, data.events, contributions, meant.objective, meant.objective_from)
    verdict = StepVerdict(context, data, contributions)
    verdict.findings = [_placed(finding, data.events) for finding in findings]
    return StepView(verdict, tolerance), _grid(run, step, meant.objective, tolerance)


def _placed(finding: Finding, events: dict[int, list[Event]]) -> Finding:
    """The finding with the culprit's place among the events of this step."""
    event = finding.first_event
    found = _find(event, events.get(event.rank, [])) if event is not None else None
    if event is None or found is None:
        return finding
    return msgspec.structs.replace(finding, first_event=msgspec.structs.replace(event, seq=found.seq))


def _find(wanted: FirstEvent, events: Sequence[Event]) -> Event | None:
    for event in events:
        if wanted.kind == "loss" and isinstance(event, LossGradient):
            if (event.accumulation_step, event.microbatch) == (wanted.accumulation_step, wanted.microbatch):
                return next((one for one in events if isinstance(one, Loss) and one.loss_id == event.loss_id), event)
        elif isinstance(event, Reduce | ScaleGrads) and event.__struct_config__.tag == wanted.kind:
            site = event.site
            if site is None or (site.file, site.line) == (wanted.file, wanted.line):
                return event
    return None


def _grid(run: Run, step: int, objective: str, tolerance: float) -> WeightGrid:
    """Documented weights of all ranks; empty where they are not known."""
    known: KnownShapes = {}
    blocks = {rank: block for rank, trace in run.ranks.items() if (block := _block(trace, step, known)) is not None}
    entries: list[Entry] = []
    expected = _expected(blocks, list(run.ranks), step, objective)
    if expected is not None:
        for rank, block in blocks.items():
            if not block.shape.weight_rows or not block.shape.ways:
                continue
            for cell in cells_of(rank, block, step - block.first_step, objective, expected):
                documented = cell.weight * cell.factor
                numbers = (documented / cell.ratio if cell.ratio else nan, documented, nan, cell.ratio)
                entries.append(Entry(("contributions of", rank), (OWN, *cell.slot), numbers, "", None))
    return fill(entries, step, tolerance, documented=True)


def _block(trace: RankTrace, step: int, known: KnownShapes) -> Block | None:
    try:
        for columns in trace.columns:
            if columns.first_step <= step < columns.first_step + columns.num_steps:
                return Blocks(known).block(trace, columns)
        return _of_events(trace, step, known)
    except ValueError:  # noted as damage when it was first read
        return None


def _of_events(trace: RankTrace, step: int, known: KnownShapes) -> Block | None:
    """Plain events as a block of one step."""
    events = [event for event in trace.events if event.step == step and isinstance(event, AnyEvent)]
    if not events:
        return None
    made: list[StepShape | StepColumns] = []
    writer = ColumnWriter(made.append)  # type: ignore[arg-type]
    writer.add(step, sorted(events, key=lambda event: event.seq))
    writer.flush()
    of_rank = RankTrace(trace.path, trace.header, param_sets=trace.param_sets)
    of_rank.add(list(made))
    return Blocks(known).block(of_rank, of_rank.columns[0])


def _expected(blocks: dict[int, Block], ranks: list[int], step: int, objective: str) -> float | None:
    """The q (stream/summaries.py) that every contribution is meant to have; None when it is not known."""
    shapes = list({id(block.shape): block.shape for block in blocks.values()}.values())
    number = {id(shape): index for index, shape in enumerate(shapes)}
    ways = np.array([number[id(blocks[rank].shape)] if rank in blocks else -1 for rank in ranks])
    hashes = [int(blocks[rank].hashes()[step - blocks[rank].first_step]) if rank in blocks else 0 for rank in ranks]
    first: dict[int, int] = {}
    same = np.array([first.setdefault(value, row) if value else row for row, value in enumerate(hashes)])
    setting = find_setting(ways, shapes, ranks, same)
    if setting.reasons:
        return None
    counted = [blocks[rank] for rank, counts in zip(ranks, setting.coordinates, strict=True) if counts]
    of_slots = [block.of_slots(block.tokens())[:, step - block.first_step] for block in counted]
    num_tokens, num_contributions = (sum(of(slots) for slots in of_slots) for of in (np.sum, np.count_nonzero))
    if not num_tokens:
        return None
    num_ranks = sum(slots.any() for slots in of_slots)
    return float(expected_weight(objective, *map(np.atleast_1d, (num_tokens, num_contributions, num_ranks)))[0])

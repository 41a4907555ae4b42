"""The way of a contribution into a gradient, event by event, and the ledger that is replayed beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from still_source import first_snapshot
from tiny_runs import header, records, write_run, write_unsummed

from gradcheck_dist.events import BEFORE, Loss, LossGradient, OptimizerStep, Samples
from gradcheck_dist.ledger.transit import Hop
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path
from gradcheck_dist.tui.step_view import StepView


def view(folder: Path) -> StepView:
    step = first_snapshot(folder).step
    assert step is not None
    return step


@pytest.mark.parametrize("fault", ["repeated", "averaged", None])
def test_an_event_documents_what_it_was_measured_to_do(tmp_path: Path, fault: str | None) -> None:
    """A sum of what an earlier one has summed doubles it, by its documentation too."""
    step = view(write_run(tmp_path / "run", fault=fault))
    factors = set()
    for (param, holder), held in step.held_by.items():
        for key in {cell.key for cell in held.cells}:
            for stop in step.stops(param, holder, key):
                if stop.measured is not None and stop.nominal is not None:
                    assert stop.nominal == pytest.approx(stop.measured, rel=1e-4)
                    factors.add(round(stop.nominal, 3))
    assert factors == {"repeated": {1.0, 2.0}, "averaged": {1.0, 0.5}, None: {1.0}}[fault]


def test_each_of_several_summands_has_its_own_line_in_the_ledger(tmp_path: Path) -> None:
    step = view(write_unsummed(tmp_path / "run"))
    (param, holder), held = next(iter(step.held_by.items()))
    key = held.cells[0].key
    of_key = [cell.ratio for cell in held.cells if cell.key == key]
    assert len(of_key) == 2
    assert min(of_key) == pytest.approx(0.0, abs=1e-6) != pytest.approx(max(of_key))  # the other rank's never came
    last = step.stops(param, holder, key)[-1]
    ledger = [ratio for cell, ratio in step.ledger_at(param, holder, last) if cell.key == key]
    assert sorted(ledger) == pytest.approx(sorted(of_key), abs=1e-6)


def test_what_happened_before_an_event_is_not_laid_to_it(tmp_path: Path) -> None:
    """Something unrecorded halves the gradient before the optimizer, which samples what it reads."""
    create_run_dir(tmp_path / "run", {"world_size": 2})
    for rank in range(2):
        writer = TraceWriter(trace_path(tmp_path / "run", rank), header(rank), background=False)
        for batch in records(rank, fault=None):
            for record in batch:
                if isinstance(record, Samples):
                    rows = np.frombuffer(record.rows, "<i4").reshape(-1, 4)
                    values = np.frombuffer(record.values, "<f8").reshape(len(rows), -1).copy()
                    values[rows[:, 1] == BEFORE] /= 2
                    record = msgspec.structs.replace(record, values=values.tobytes())
                writer.append(record)
        writer.close()
    step = view(tmp_path / "run")
    (param, holder), held = next(iter(step.held_by.items()))
    last = step.stops(param, holder, held.cells[0].key)[-1]
    assert isinstance(last.event, OptimizerStep)
    assert (last.before, last.after) == pytest.approx((0.5, 0.5))


def test_what_a_stage_sent_and_something_halved_arrives_as_half(tmp_path: Path) -> None:
    step = view(write_run(tmp_path / "run", fault=None))
    (param, holder), held = next(iter(step.held_by.items()))
    cell = held.cells[0]
    right = step.stops(param, holder, cell.key)
    held.hops[cell.column] = (Hop(0.5, 0.0, 0, None, None),)
    step._paths.clear()
    halved = step.stops(param, holder, cell.key)
    for one, other in zip(right, halved, strict=True):
        at_the_loss = isinstance(one.event, Loss | LossGradient)
        assert other.after == pytest.approx(one.after * (1.0 if at_the_loss else 0.5))
        assert other.measured == pytest.approx(one.measured)

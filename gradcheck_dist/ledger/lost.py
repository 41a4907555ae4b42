"""Records of a step that were written and are not there: lost with a damaged frame, or with one that is gone.

What is left of such a step says nothing: without one loss all tokens are fewer, and every weight looks wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gradcheck_dist.events import Event, OptimizerStep, Reduce, Replica, RunEnd, StepEnd
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import plural


def lost(run: Run, data: StepData) -> dict[int, str]:
    """What of a step is, or may be, missing in the trace of which rank, in words."""
    found: dict[int, str] = {}
    ended = {rank: any(isinstance(event, StepEnd) for event in events) for rank, events in data.events.items()}
    closed = {rank for rank, events in data.events.items() if any(isinstance(event, RunEnd) for event in events)}
    for rank, events in data.events.items():
        trace = run.ranks[rank]
        stepped = any(isinstance(event, OptimizerStep) for event in events) and any(ended.values())
        # Records are written every few milliseconds: who was killed, where another closed its trace, wrote not all.
        killed = rank not in closed and bool(closed)
        words = [*_uncounted(trace, data.step, events), *_unnamed(trace, data.step, events)]
        if not ended[rank] and (stepped or killed or any(damage.since <= data.step for damage in trace.damage)):
            words.insert(0, "the last records")
        words = words if events else ["all its records"]
        if words:
            found[rank] = " and ".join(words)
    return found


def _uncounted(trace: RankTrace, step: int, events: Sequence[Event]) -> Iterator[str]:
    """What there is less of than the end of the step says."""
    end = next((event for event in reversed(events) if isinstance(event, StepEnd)), None)
    if end is None:
        return
    told = sum(event.seq <= end.seq and not isinstance(event, Replica) for event in events)
    rows = sum(int((seqs <= end.seq).sum()) for seqs, _ in _rows(trace, step))
    norms = sum(one.step == step and one.seq <= end.seq for one in trace.norms)
    for noun, meant, there in (
        ("event", end.num_events, told), ("sample", end.num_rows, rows), ("norm", end.num_norms, norms)
    ):  # fmt: skip
        if meant is not None and there < meant:
            yield f"{meant - there} of {plural(meant, noun)}"


def _unnamed(trace: RankTrace, step: int, events: Sequence[Event]) -> Iterator[str]:
    """Tables that the step's records refer to: written once, when something was first seen."""
    sets = {one for event in events if isinstance(one := getattr(event, "params", None), int)}
    known = {param for one in sets for param in trace.param_sets.get(one, ())}
    plans = {plan for _, of_rows in _rows(trace, step) for plan in np.unique(of_rows).tolist()}
    wrappers = {event.wrapper for event in events if isinstance(event, Reduce) and event.wrapper is not None}
    named = sets <= trace.param_sets.keys() and known <= trace.params.keys() and wrappers <= trace.wrappers.keys()
    if not (named and plans <= trace.plans.keys()):
        yield "the names or shapes of some of its parameters"


def _rows(trace: RankTrace, step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Which events samples belong to and by which plans they were taken, a pair a record, each of shape (rows,)."""
    for samples in trace.samples:
        if samples.step == step:
            rows = np.frombuffer(samples.rows, dtype="<i4").reshape(-1, 4)
            yield rows[:, 0], rows[:, 3]

"""A trace from which one probe is missing."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gradcheck_dist.events import Event, Samples
from gradcheck_dist.trace.run import Run


def hold_back(run: Run, kind: type[Event], ranks: Iterable[int] | None = None) -> Run:
    """Take every event of a kind out of a run, and the samples that hang on it; of these ranks alone, where given."""
    for trace in [run.ranks[rank] for rank in run.ranks if ranks is None or rank in ranks]:
        gone = {event.seq for event in trace.events if isinstance(event, kind)}
        trace.events = [event for event in trace.events if not isinstance(event, kind)]
        trace.samples = [_without(trace.plans, samples, gone) for samples in trace.samples]
    return run


def _without(plans: dict[int, object], samples: Samples, gone: set[int]) -> Samples:
    rows = np.frombuffer(samples.rows, dtype="<i4").reshape(-1, 4)
    size = 2 if samples.dtype == "bfloat16" else 4
    kept_rows, kept_values, start = [], [], 0
    for row in rows:
        length = plans[int(row[3])].num_values * size  # type: ignore[attr-defined]
        if int(row[0]) not in gone:
            kept_rows.append(row)
            kept_values.append(samples.values[start : start + length])
        start += length
    return Samples(
        step=samples.step,
        rows=np.array(kept_rows, dtype="<i4").tobytes(),
        dtype=samples.dtype,
        values=b"".join(kept_values),
    )

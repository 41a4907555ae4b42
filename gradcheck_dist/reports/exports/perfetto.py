"""A timeline in the Chrome trace format: opens in ui.perfetto.dev, a process a rank with lanes for what it does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports.text import printable
from gradcheck_dist.reports.timeline import Span, places_of_culprits, spans
from gradcheck_dist.trace.run import Run

LANES = {"step_end": (1, "step"), "backward": (2, "backward"), "reduce": (3, "reduce"), "loss": (4, "loss")}
_OTHER = (5, "gradients")


def write(report: Report, run: Run | None, output: Path) -> list[Path]:
    """Write the timeline into the file `output`.

    Raises:
        GradcheckError: E707 the run itself is not at hand, or no event has a time.
    """
    culprits = places_of_culprits(report)
    found = list(spans(run, culprits=culprits)) if run is not None else []
    if run is None or not found:
        raise GradcheckError(
            "a timeline needs the events of a run, each with its time. "
            + (
                "Name the run folder, not a JSON report."
                if run is None
                else "This run has no step with samples, and of others no times are kept: record one with `gradcheck "
                "run --steps 0:3`, or use --format csv."
            ),
            code="E707",
        )
    origin = min(span.start_ns for span in found)
    with open(output, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(entry) for entry in _entries(found, origin, culprits)))
        file.write("\n]}\n")
    return [output]


def _entries(found: list[Span], origin: int, culprits: dict[tuple[int, int], str]) -> Iterator[dict[str, Any]]:
    for rank in sorted({span.rank for span in found}):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for lane, name in (*LANES.values(), _OTHER):
            yield {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": rank, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}
    for span in found:
        name = f"step {span.step}" if span.kind == "step_end" else f"{span.kind} {span.text}".strip()
        code = culprits.get((span.rank, span.seq))
        entry: dict[str, Any] = {
            "name": f"{name}  <- {printable(code, 20)}" if code else name,
            "cat": "culprit" if code else span.kind,
            "pid": span.rank,
            "tid": LANES.get(span.kind, _OTHER)[0],
            "ts": (span.start_ns - origin) / 1000,
            "args": {"step": span.step, "seq": span.seq, "site": printable(span.site, 400)},
        }
        yield entry | ({"ph": "X", "dur": span.duration_ns / 1000} if span.duration_ns else {"ph": "i", "s": "t"})

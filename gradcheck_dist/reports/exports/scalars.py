"""What a logger of scalars gets: one number a step and name, and the facts of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.reports.along import contribution_places, medians, mesh_places
from gradcheck_dist.reports.tables import table
from gradcheck_dist.reports.text import printable
from gradcheck_dist.trace.run import Run

MAX_COORDINATES = 64


def scalars(report: Report, run: Run | None) -> Iterator[tuple[int, str, float]]:
    """(step, name, value): logged metrics, norms before and after clipping, the median ratio of all weights and of each
    coordinate below MAX_COORDINATES on every axis of the mesh, of data ranks, accumulation steps and microbatches."""
    for step, name, value in table("metrics", report, run).rows:
        if value is not None:
            yield step, f"gradcheck/{printable(name, 80)}", value
    first = min(run.ranks, default=0) if run is not None else 0
    for step, rank, _, before, _, coefficient, after, _ in table("norms", report, run).rows:
        if rank == first:
            yield step, "gradcheck/norm_before_clip", before
            yield step, "gradcheck/norm_after_clip", after
            yield step, "gradcheck/clip_coefficient", coefficient
    for (at, _, _), ratio in medians(report, {"all": lambda weight: 0}).items():
        yield at, "gradcheck/ratio/all", ratio
    for (at, axis, place), ratio in medians(report, contribution_places() | mesh_places(report)).items():
        if place < MAX_COORDINATES:
            yield at, f"gradcheck/ratio/{axis}/{place}", ratio


def by_step(report: Report, run: Run | None) -> dict[int, dict[str, float]]:
    """The same, for loggers that take all of a step at once; a name that comes twice keeps its last value."""
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for step, name, value in scalars(report, run):
        steps[step][name] = value
    return dict(sorted(steps.items()))


def facts(report: Report) -> dict[str, str | int]:
    """Mesh degrees, objective, verdict and the codes found, as parameters of a run."""
    degrees = {printable(name, 40): degree for name, degree in report.run.axes.items()}
    return {
        **degrees,
        "objective": printable(report.run.objective or "unknown", 80),
        "verdict": report.verdict,
        "findings": ", ".join(sorted({finding.code for finding in report.findings})) or "none",
    }

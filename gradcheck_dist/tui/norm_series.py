"""The gradient norm of judged steps, out of the norms that every rank recorded of what it holds."""

from __future__ import annotations

from collections.abc import Iterable

from gradcheck_dist.diagnosis.norms.step_norms import norm_of, step_norms
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.trace.run import Run


def recorded_norms(run: Run, verdicts: Iterable[StepVerdict]) -> dict[int, float]:
    """By step the norm before any clipping, all parts of the first rank's model together; steps in which it is not
    known exactly (summands, layouts that were not recorded) are left out."""
    found: dict[int, float] = {}
    for verdict in verdicts:
        norms = step_norms(run, verdict.data, verdict.contributions.coordinate)
        if not norms.parts:
            continue
        model = norms.together(min(rank for rank, _ in norms.parts))
        total = norm_of(part for (rank, _), part in norms.parts.items() if rank in model)
        if total.known and total.exact:
            found[verdict.context.step] = total.middle
    return found

"""Steps that are off by other numbers than a measured one, and by one law: tokens differ from step to step.

A loss that takes means over each pass's or each rank's own tokens weighs them otherwise in every step. Compared with
the mean that it takes, all such steps are off by one number, or by none.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.stream.plain import PlainReader
from gradcheck_dist.stream.shares import ReadShares
from gradcheck_dist.stream.trusted import PIECE_BYTES
from gradcheck_dist.stream.watch import Watch
from gradcheck_dist.trace.run import Run

TAKEN = {"GS301": "microbatch-mean", "GS302": "rank-token-mean"}
"""The mean that a loss took, by the rule that names it."""
ALIKE = 1e-4


def cause_of_law(report: Report, finding: Finding, run: Run, read: ReadShares) -> Finding | None:
    """The one finding of the measured steps whose law the steps of another follow; None where they do not surely."""
    causes = [one for one in report.findings if one.severity != "info"]
    if len(causes) != 1 or causes[0].code not in TAKEN or not set(finding.ranks) <= set(causes[0].ranks):
        return None
    steps = {*causes[0].steps, *finding.steps}
    files = {rank: trace.path for rank, trace in run.ranks.items()}
    watch = Watch(sorted(files), TAKEN[causes[0].code], steps)
    off: dict[int, tuple[float, float]] = {}
    for told in read(files, watch.objective, PIECE_BYTES, PlainReader):
        off |= {deviation.step: (deviation.low, deviation.high) for deviation in watch.take(told)}
    ends = [end for step in steps for end in off.get(step, (1.0, 1.0))]
    one_law = watch.num_judged == len(steps) and max(ends) - min(ends) <= ALIKE * abs(max(ends))
    return causes[0] if one_law else None

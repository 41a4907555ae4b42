"""Whether steps that are off as documented accuse anybody: what was measured in the same run tells.

A trainer that divides gradients by hand, evaluates a batch twice or trains several models is off by its records, and
right. Its measured steps are then off as documented too, though nothing was found in them.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.plain import MeasuredReader
from gradcheck_dist.stream.shares import ReadShares
from gradcheck_dist.stream.watch import EMPTIED, OF_ELEMENTS, Deviation, Watch
from gradcheck_dist.trace.run import Run

PIECE_BYTES = 64 << 10
MAX_LOOKED_AT = 8
"""Measured steps that are compared as documented: the first ones, so that a long run is not read a second time."""


class Records:
    """How far the records of a run are to be believed, beside the report of its measured steps."""

    def __init__(self, run: Run, report: Report, read: ReadShares) -> None:
        accused = {step for one in report.findings if one.severity != "info" for step in one.steps}
        measured = {weight.step for weight in report.weights}
        self._any_measured = bool(measured)
        right = sorted(measured - accused)[:MAX_LOOKED_AT]
        self._off = _first_off(run, report.run.objective, right, read) if right else None

    def why_open(self, deviation: Deviation) -> str:
        """Why a deviation accuses nobody, in words; "" where it does."""
        if self._off is not None:
            return (
                f"and so they are in step {self._off}, which was measured and in which nothing was found: not all that "
                "makes up the weights of this trainer is recorded"
            )
        return "" if self._any_measured and deviation.excuse not in (EMPTIED, OF_ELEMENTS) else deviation.excuse


def _first_off(run: Run, objective: str, steps: list[int], read: ReadShares) -> int | None:
    files = {rank: trace.path for rank, trace in run.ranks.items()}
    watch = Watch(sorted(files), objective, steps)
    for told in read(files, objective, PIECE_BYTES, MeasuredReader):
        for deviation in watch.take(told):
            return deviation.step
        if watch.last_step is not None and watch.last_step >= steps[-1]:
            break
    return None

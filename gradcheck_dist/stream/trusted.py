"""Whether steps that are off as documented accuse anybody: what was measured in the same run tells.

A trainer that divides gradients by hand, evaluates a batch twice or trains several models is off by its records, and
right. Its measured steps are then off as documented too, though nothing was found in them, or something else.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.findings import same_ends
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
        self._why = _why_not_all(run, report, sorted(measured - accused), sorted(measured & accused), read)

    def why_open(self, deviation: Deviation) -> str:
        """Why a deviation accuses nobody, in words; "" where it does."""
        if self._why:
            return f"{self._why}: not all that makes up the weights of this trainer is recorded"
        return "" if self._any_measured and deviation.excuse not in (EMPTIED, OF_ELEMENTS) else deviation.excuse


def _why_not_all(run: Run, report: Report, right: list[int], wrong: list[int], read: ReadShares) -> str:
    for deviation in _off(run, report.run.objective, right, read):
        return f"and so they are in step {deviation.step}, which was measured and in which nothing was found"
    for deviation in _off(run, report.run.objective, wrong, read):
        if measured_otherwise(report, deviation):
            return f"and so they are in step {deviation.step}, in which other weights were measured"
    return ""


def measured_otherwise(report: Report, deviation: Deviation) -> bool:
    """Whether no parameter's weights were measured to be off as they are by the records."""
    ratios: dict[str, list[float]] = {}
    for weight in report.weights:
        if weight.step == deviation.step and weight.holder_rank in deviation.ranks and weight.ratio is not None:
            ratios.setdefault(weight.unit, []).append(weight.ratio)
    ends = (deviation.low, deviation.high)
    return bool(ratios) and not any(same_ends(ends, of_unit) for of_unit in ratios.values())


def _off(run: Run, objective: str, steps: list[int], read: ReadShares) -> Iterator[Deviation]:
    """What is off as documented in the first of some measured steps."""
    files, chosen = {rank: trace.path for rank, trace in run.ranks.items()}, steps[:MAX_LOOKED_AT]
    watch = Watch(sorted(files), objective, chosen)
    for told in read(files, objective, PIECE_BYTES, MeasuredReader) if chosen else ():
        yield from watch.take(told)
        if watch.last_step is not None and watch.last_step >= chosen[-1]:
            break

"""The findings, worst first."""

from __future__ import annotations

from collections.abc import Iterable

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.reports.document import factor_name
from gradcheck_dist.reports.source import short_path
from gradcheck_dist.reports.text import spans
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.tui.widgets.rows import Piece, Rows, fit

NARROW = 76
"""On fewer columns the line stands where parameters and ranks would."""
_LOOKS = {"error": "bad", "warning": "warn", "info": "accent"}


class FindingsList(Rows):
    """One finding a row."""

    header_rows = 1
    DEFAULT_CSS = "FindingsList { min-height: 3; }"

    def show(self, snapshot: Snapshot) -> None:
        report = snapshot.report
        if report is not self._report:
            self._report = report
            self.count = len(report.findings) if report is not None else 0
            self.refresh()

    _report: Report | None = None

    def header(self, row: int) -> Iterable[Piece]:
        who = "" if self.size.width < NARROW else "params ranks   "
        yield f"finding                      factor               {who}where", "head"

    def pieces(self, index: int) -> Iterable[Piece]:
        assert self._report is not None
        finding = self._report.findings[index]
        factor = factor_name(finding)
        event = finding.first_event
        where = f"{short_path(event.file)}:{event.line}" if event is not None and event.file else "-"
        narrow = self.size.width < NARROW
        room = self.size.width - (50 if narrow else 66)
        where = where if len(where) <= room else f"…{where[1 - max(room, 10) :]}"
        yield fit(f"{finding.code} {finding.name}", 28) + " ", _LOOKS.get(finding.severity, "plain")
        yield fit(factor, 20) + " ", "bold"
        if not narrow:
            yield f"{finding.num_parameters or '-':>6} {fit(spans(finding.ranks), 7)} ", "plain"
        yield where, "accent"

    def empty(self) -> str:
        return {"clean": "no findings", "undetermined": "no findings, but the run could not be judged"}.get(
            self._report.verdict if self._report is not None else "", "no findings yet"
        )

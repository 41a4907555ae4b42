"""What became of several scenarios, as one table: a row a variant."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from gradcheck_dist import __version__
from gradcheck_dist.diagnosis.finding import Finding, VariantReport
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports.markdown import text as escaped
from gradcheck_dist.reports.source import short_path
from gradcheck_dist.reports.text import number, printable
from gradcheck_dist.scenarios.runner import MIB, Cost, Result
from gradcheck_dist.wording import plural

COLUMNS = ("scenario", "variant", "found", "factor", "culprit", "seconds", "MiB", "as the file says")

_MARKS = {True: "ok ", False: "NOT", None: "-  "}


@dataclass(frozen=True)
class Row:
    """A variant and what was found in it. Of a scenario that did not start there is one row, without a variant.

    Attributes:
        expected: codes and names that the file asks for; "clean" where nothing may be found.
        found: likewise; None where nothing could be judged.
        seconds: to train and to judge; None where nothing started.
        peak_memory_bytes: the sum over ranks of the most that each held.
        as_expected: None where the scenario was skipped, since it cannot have what the command line sets.
        note: how the result differs from the file, or why there is none; a bug of torch's own that is mended says so.
    """

    scenario: str
    variant: str
    expected: str
    found: str | None
    factor: str
    culprit: str
    seconds: float | None
    peak_memory_bytes: int | None
    as_expected: bool | None
    note: str


def rows(result: Result) -> list[Row]:
    """A scenario's rows, in the order of its variants."""
    pairs = itertools.zip_longest(result.report.variants, result.costs)
    return [_row(result.report.scenario, variant, cost) for variant, cost in pairs]


def _row(scenario: str, variant: VariantReport, cost: Cost | None) -> Row:
    expected, report = variant.expected_finding, variant.report
    findings = report.findings if report else []
    return Row(
        scenario=scenario,
        variant=variant.variant,
        expected=_named(expected.code, expected.name) if expected else "clean",
        found=_found(findings, report.verdict) if report else None,
        factor=", ".join(map(_factor, findings)),
        culprit=", ".join(dict.fromkeys(map(_culprit, findings))),
        seconds=round(cost.seconds, 2) if cost else None,
        peak_memory_bytes=cost.peak_memory_bytes if cost else None,
        as_expected=variant.as_expected,
        note=variant.mismatch,
    )


def refused(scenario: str, error: Exception) -> Row:
    """The row of a scenario that could not start, or whose judging broke."""
    return Row(scenario, "", "", None, "", "", None, None, False, said(error))


def skipped(scenario: str, error: GradcheckError) -> Row:
    """The row of a scenario that cannot have what the command line sets, such as another number format."""
    return Row(scenario, "", "", None, "", "", None, None, None, said(error))


def said(error: Exception) -> str:
    """An error in words, with its code or its type."""
    return f"{error.code if isinstance(error, GradcheckError) else type(error).__name__}: {error}"


def _named(codes: str, names: str) -> str:
    pairs = zip(codes.split(", "), names.split(", "), strict=True)
    return ", ".join(f"{code} {name}" for code, name in pairs)


def _found(findings: Sequence[Finding], verdict: str) -> str:
    return ", ".join(f"{finding.code} {printable(finding.name)}" for finding in findings) or verdict


def _factor(finding: Finding) -> str:
    factor = finding.factor
    if factor.expression not in (None, "1"):
        return printable(factor.expression or "")
    return number(factor.observed, 6) if factor.observed is not None and factor.expression is None else finding.pattern


def _culprit(finding: Finding) -> str:
    event = finding.first_event
    if event is None:
        return "none"
    return f"{event.kind} {short_path(event.file)}:{event.line}" if event.file else event.kind


def summary(table: Sequence[Row]) -> str:
    """One sentence over all."""
    ran = [row for row in table if row.as_expected is not None]
    scenarios = {row.scenario for row in ran}
    right = sum(row.as_expected is True for row in ran)
    seconds = sum(row.seconds or 0.0 for row in table)
    peak = max((row.peak_memory_bytes or 0 for row in table), default=0)
    memory = f", at most {peak / MIB:.0f} MiB at once" if peak else ""
    left_out = f"; {plural(len(table) - len(ran), 'scenario')} skipped" if len(ran) < len(table) else ""
    return (
        f"{right} of {plural(len(ran), 'variant')} of {plural(len(scenarios), 'scenario')} as the files say, in "
        f"{seconds:.0f} s{memory}{left_out}"
    )


def text(table: Sequence[Row]) -> str:
    """The table for a terminal; a line below a row says what is not as its file says."""
    return "\n".join([*lines(table), summary(table), ""])


def lines(table: Sequence[Row]) -> Iterator[str]:
    """Each row as one line, and a second one where there is something to say."""
    for row in table:
        place = f"{row.scenario} {row.variant}".strip()
        cost = f"{row.seconds:6.1f} s {_mib(row):>5} MiB" if row.seconds is not None else f"{'-':>18}"
        where = f" ({row.factor}; {row.culprit})" if row.culprit else ""
        yield f"{_MARKS[row.as_expected]} {cost}  {place}: {_became(row)}{where}"
        if row.note:
            yield f"{'':24}{printable(row.note, 2000)}"


def markdown(table: Sequence[Row]) -> str:
    """The table for a page or a pull request."""
    head = [f"{summary(table)}.", "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    body = []
    for row in table:
        agreement = {True: "yes", False: "**no**", None: "skipped"}[row.as_expected]
        cells = (
            row.scenario,
            row.variant,
            _became(row),
            row.factor,
            row.culprit,
            f"{row.seconds:.1f}" if row.seconds is not None else "",
            _mib(row),
        )
        note = f": {_inert(row.note)}" if row.note else ""
        body.append("| " + " | ".join([*map(_inert, cells), agreement + note]) + " |")
    return "\n".join([*head, *body, ""])


def _became(row: Row) -> str:
    if row.found is not None:
        return row.found
    return "skipped" if row.as_expected is None else "could not run"


def _mib(row: Row) -> str:
    """Memory of all ranks together; empty where no rank told."""
    return f"{row.peak_memory_bytes / MIB:.0f}" if row.peak_memory_bytes is not None else ""


def _inert(value: str) -> str:
    return escaped(printable(value, 500))


def document(table: Sequence[Row]) -> str:
    """The table as JSON, for a benchmark to keep."""
    content = {
        "schema_version": 1,
        "tool": {"name": "gradcheck", "version": __version__},
        "as_expected": not any(row.as_expected is False for row in table),
        "rows": [asdict(row) for row in table],
    }
    return json.dumps(content, indent=2) + "\n"

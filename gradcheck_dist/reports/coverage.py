"""What a verdict rests on, and what it could not see, in words."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.finding import Report, Unverified
from gradcheck_dist.reports.text import data_ranks, printable, prose, some
from gradcheck_dist.wording import plural

EXACT = "exact"
"""A way of recording that stands beside the probes, since it hides what they see otherwise; it could hook."""


def coverage_lines(report: Report) -> list[str]:
    """What was seen and what not, line by line. The JSON report has the names of what was in order."""
    coverage, lines = report.coverage, []
    lines.append(f"{coverage.parameters_observed} of {plural(coverage.parameters_total, 'parameter')} observed")
    if coverage.unidentifiable:
        names = [f"{entry.parameter} ({entry.reason})" for entry in coverage.unidentifiable]
        lines.append(f"unidentifiable: {some(names, 3, 160)}")
    if coverage.probes_active:
        lines.append(f"{plural(len(coverage.probes_active), 'probe')} in place")
    missing = [f"{entry.probe} ({entry.reason})" for entry in coverage.probes_missing if entry.probe != EXACT]
    if missing:
        lines.append(f"probes that could not hook: {some(missing, 5, 160)}")
    lines += [f"--{EXACT}: {prose(entry.reason, 300)}" for entry in coverage.probes_missing if entry.probe == EXACT]
    lines += [f"problem: {prose(problem, 300)}" for problem in coverage.problems[:10]]
    if len(coverage.problems) > 10:
        lines.append(f"and {plural(len(coverage.problems) - 10, 'more problem')}")
    lines += [f"note: {prose(note, 300)}" for note in coverage.notes[:10]]
    if len(coverage.notes) > 10:
        lines.append(f"and {plural(len(coverage.notes) - 10, 'more note')}")
    lines += _unverified(coverage.unverified)
    rules = report.rules
    told = [f"failed {some(rules.failed, 12)}"] if rules.failed else []
    told += [f"{len(rules.passed)} passed"] if rules.passed else []
    told += [f"{len(rules.not_triggered)} had nothing to judge here"] if rules.not_triggered else []
    if told:
        lines.append("rules: " + ", ".join(told))
    overhead = report.overhead
    if overhead.share_of_step is not None:
        size = f", {overhead.trace_bytes_per_step / 1000:.0f} kB of trace" if overhead.trace_bytes_per_step else ""
        lines.append(f"probes took {overhead.share_of_step:.1%} of a step{size}")
    for what, value, source in (
        ("axes", " ".join(f"{axis}={degree}" for axis, degree in report.run.axes.items()), report.run.axes_from),
        ("data ranks", data_ranks(report.run.data_ranks), report.run.data_ranks_from),
        ("objective", report.run.objective, report.run.objective_from),
    ):
        if source != "declared" and value:
            lines.append(f"{what} {printable(value)} ({prose(source, 200)})")
    return lines


def _unverified(left_out: Sequence[Unverified]) -> list[str]:
    """What `--verify` did not check, by reason; the JSON report has every one."""
    by_reason: dict[str, list[str]] = {}
    for one in left_out:
        name = {
            "module": one.module,
            "meant": one.module,
            "calls": f"{one.name} of {one.module}",
            "forward": f"{one.name} more of {one.module}",
        }.get(one.what, f"{one.module}.{one.name}")
        by_reason.setdefault(one.reason, []).append(name)
    return [f"not verified: {some(names, 8)}: {prose(reason, 200)}" for reason, names in by_reason.items()]

"""The steps of a run that stand in columns, judged: their findings, and what a report says of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass, field, replace

import msgspec

from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.diagnosis.report.next_step import next_step
from gradcheck_dist.stream.findings import Groups, finding_of, same_ends
from gradcheck_dist.stream.laws import cause_of_law
from gradcheck_dist.stream.plain import PlainReader, UnmeasuredReader
from gradcheck_dist.stream.series import Series
from gradcheck_dist.stream.shares import ReadShares, read_shares
from gradcheck_dist.stream.summaries import READ_BYTES
from gradcheck_dist.stream.trusted import Records, measured_otherwise
from gradcheck_dist.stream.watch import Deviation, Watch
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trace.store import size_of
from gradcheck_dist.wording import numbered, plural

FIRST_BYTES, PLAIN_BYTES = 256 << 10, 64 << 10
"""Read of each rank at a time where the first step that is off is all that is wanted, and where single events are read:
so that it is soon known."""


@dataclass
class Watched:
    """`has_more`: the run also has steps that do not stand in columns. `stopped`: not read to its end. `deviations`:
    the first of each finding."""

    findings: list[Finding] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    series: Series = field(default_factory=Series)
    num_judged: int = 0
    first_step: int | None = None
    first_finding: int | None = None
    has_more: bool = False
    stopped: bool = False


def watch_run(
    run: Run,
    objective: str,
    *,
    steps: Container[int] | None = None,
    first: bool = False,
    read: ReadShares = read_shares,
    told: Callable[[int, int, int, float], None] | None = None,
    plain: bool = False,
    early: Callable[[Watched], None] | None = None,
) -> Watched:
    """Judge all steps in columns, and those that a rank wrote event by event because too many were unlike.

    Args:
        run: headers and places of the traces.
        objective: what a step's gradient is meant to be.
        steps: those that are compared; None: all.
        first: stop at the first step that is off.
        read: who reads the ranks.
        told: called now and then with the last step, how many were judged, how many are off, and the share of bytes.
        plain: take steps that were recorded event by event as if they stood in columns.
        early: called once, with what is known when the first step is off.
    """
    files = {rank: trace.path for rank, trace in run.ranks.items()}
    num_bytes = sum(size_of(path) for path in files.values())
    watch = Watch(sorted(files), objective, steps)
    groups, make = Groups(plain), PlainReader if plain else UnmeasuredReader
    num_read = num_off = 0
    has_more = False
    read_bytes = PLAIN_BYTES if plain else FIRST_BYTES if first else READ_BYTES
    for told_by in read(files, objective, read_bytes, make):
        num_read += sum(round_.num_bytes for round_ in told_by.values())
        has_more |= any(round_.has_more for round_ in told_by.values())
        for deviation in watch.take(told_by):
            num_off += 1
            groups.add(deviation)
            if first:
                break
        if told is not None and watch.last_step is not None:
            told(watch.last_step, watch.num_judged, num_off, num_read / max(num_bytes, 1))
        if groups.groups and early is not None:
            early(result_of(watch, groups, run))
            early = None
        if first and groups.groups:
            break
    result = result_of(watch, groups, run)
    result.has_more, result.stopped = has_more, first and bool(groups.groups)
    return result


def result_of(watch: Watch, groups: Groups, run: Run) -> Watched:
    """What has been seen so far."""
    result, files = Watched(), {rank: trace.path for rank, trace in run.ranks.items()}
    result.findings = found = [
        finding_of(group, run, files, watch.tolerance, watch.objective, groups.plain)
        for group in groups.groups.values()
    ]
    result.deviations = [group.first for group in groups.groups.values()]
    result.first_finding = min((finding.step for finding in found), default=None)
    result.num_judged, result.problems, result.series = watch.num_judged, list(watch.problems), watch.series
    result.first_step = watch.first_step
    _say(watch, groups, result)
    return result


def _say(watch: Watch, groups: Groups, result: Watched) -> None:
    if watch.first_step is not None:
        off = "1 step is off" if groups.num_steps == 1 else f"{groups.num_steps} steps are off"
        alone = watch.first_step == watch.last_step
        which = f"step {watch.first_step}" if alone else f"steps {watch.first_step} to {watch.last_step}"
        result.notes.append(
            f"{which}, {_how(groups)}: documented weights of "
            f"{plural(watch.num_judged, 'step')} "
            f"({plural(watch.num_contributions, 'contribution')}) were compared, {off}"
        )
    if watch.num_skipped:
        result.notes.append(f"{plural(watch.num_skipped, 'step')} in columns never reached an optimizer")
    if groups.num_left_out:
        result.notes.append(f"off in yet other ways: {plural(groups.num_left_out, 'step')}")
    result.reasons = [
        f"{plural(count, 'step')} {_how(groups)} cannot be judged: {reason}" for reason, count in watch.reasons.items()
    ]


def _how(groups: Groups) -> str:
    return "compared without measuring their samples" if groups.plain else "recorded without samples"


def add_to(
    report: Report, watched: Watched, run: Run, *, sampled: bool, read: ReadShares = read_shares, plain: bool = False
) -> None:
    """Put what the columns showed into the report of the measured steps. `run`, `read`, `plain`: as in watch_run."""
    order = {"error": 0, "warning": 1, "info": 2}
    off = _follow(report, _take_over(report, watched), run, read)
    unnamed, left_open = _sure(off, report, run, read)
    report.findings = sorted([*report.findings, *unnamed], key=lambda finding: (order[finding.severity], finding.step))
    report.coverage.problems += watched.problems
    report.coverage.notes += watched.notes
    watched.series.add_to(report)
    if not sampled:
        what = "measured" if plain else "recorded with samples"
        report.reasons = [
            f"no step was {what}: that recorded operations did what they are documented to do was taken for granted"
        ]
    report.reasons += watched.reasons
    for why, of_reason in left_open.items():
        steps = sorted({step for finding in of_reason for step in finding.steps})
        report.reasons.append(
            f"{numbered('step', steps)}: off as documented, {why}. {of_reason[0].suggested_experiment}"
        )
    accused = [finding for finding in report.findings if finding.severity != "info"]
    if accused:
        report.verdict = "findings"
        report.rules.failed = sorted({*report.rules.failed, *(finding.code for finding in unnamed)})
        report.rules.passed = [code for code in report.rules.passed if code not in report.rules.failed]
        report.rules.not_triggered = [code for code in report.rules.not_triggered if code not in report.rules.failed]
        report.next_step = report.findings[0].fix
    elif report.verdict == "clean" and report.reasons:
        report.verdict = "undetermined"
        report.next_step = next_step(report)


def _sure(
    off: list[tuple[Finding, Deviation]], report: Report, run: Run, read: ReadShares
) -> tuple[list[Finding], dict[str, list[Finding]]]:
    """Of what is off as documented what accuses, and what is left open, by why."""
    accusing: list[Finding] = []
    left_open: dict[str, list[Finding]] = {}
    records = Records(run, report, read) if off else None
    for finding, deviation in off:
        why = records.why_open(deviation) if records is not None else ""
        (left_open.setdefault(why, []) if why else accusing).append(finding)
    return accusing, left_open


def _take_over(report: Report, watched: Watched) -> list[tuple[Finding, Deviation]]:
    """Name the deviations that a measured step documents as well, and for which one cause was found there: that finding
    has these steps too. The others are returned."""
    rest = []
    for finding, deviation in zip(watched.findings, watched.deviations, strict=True):
        for step in report.run.steps:
            causes = [one for one in report.findings if one.severity != "info" and step in one.steps]
            if len(causes) != 1 or causes[0].ranks != finding.ranks:
                continue
            if not same_ends((deviation.low, deviation.high), _ends(report, step, finding.ranks)):
                continue
            if measured_otherwise(report, replace(deviation, step=step)):
                continue  # what is off as documented there is not what was found
            _name(report, causes[0], finding, "As documented, it was the same")
            break
        else:
            rest.append((finding, deviation))
    return rest


def _follow(
    report: Report, off: list[tuple[Finding, Deviation]], run: Run, read: ReadShares
) -> list[tuple[Finding, Deviation]]:
    """Name those that follow the law of a measured step's one cause, by other numbers. The others are returned."""
    rest = []
    for finding, deviation in off:
        cause = cause_of_law(report, finding, run, read)
        if cause is None:
            rest.append((finding, deviation))
        else:
            _name(report, cause, finding, "As documented, losses took the same mean, of other tokens,")
    return rest


def _name(report: Report, cause: Finding, finding: Finding, same: str) -> None:
    """Give a cause the steps of what it explains."""
    named = msgspec.structs.replace(
        cause,
        steps=sorted({*cause.steps, *finding.steps}),
        explanation=f"{cause.explanation} {same} in {plural(len(finding.steps), 'step')} without a measurement.",
    )
    report.findings = [named if one is cause else one for one in report.findings]


def _ends(report: Report, step: int, ranks: Collection[int]) -> list[float]:
    """documented / expected of all weights that these ranks held in a measured step."""
    return [
        weight.nominal / weight.expected
        for weight in report.weights
        if weight.step == step and weight.holder_rank in ranks and weight.nominal is not None and weight.expected
    ]

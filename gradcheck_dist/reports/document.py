"""What every format says, said once: verdict, why, next, the culprit, the weight tables, the coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradcheck_dist.diagnosis.finding import (
    Candidate,
    Finding,
    FirstEvent,
    Report,
    ScenarioReport,
    Unverified,
    VariantReport,
)
from gradcheck_dist.diagnosis.rules import find_rule
from gradcheck_dist.reports.source import Excerpt, excerpt, short_path
from gradcheck_dist.reports.text import data_ranks, number, plural, printable, prose, some, spans
from gradcheck_dist.reports.weights import WeightTable, weight_tables

MAX_CONSEQUENCES = 8
WRONG_BACKWARD = "GS801"
VERDICT_WORDS = {"clean": "CLEAN", "findings": "FOUND", "undetermined": "COULD NOT JUDGE"}


@dataclass(frozen=True)
class Culprit:
    """Where it happened: one line to find it, what is known about the event, and the source around it."""

    line: str
    facts: tuple[str, ...]
    excerpt: Excerpt | None
    path: str | None = None
    line_number: int = 1


@dataclass(frozen=True)
class FindingText:
    """One finding in words. `code`, `name` and `severity` are for programs that read the report."""

    code: str
    name: str
    severity: str
    title: str
    factor: str
    where: str
    explanation: str
    fix: str
    facts: tuple[str, ...]
    culprit: Culprit | None


@dataclass(frozen=True)
class RuleText:
    """A rule, or what a finding says that it is; `outcome` is "failed", "passed" or "not triggered"."""

    code: str
    name: str
    summary: str
    outcome: str


@dataclass(frozen=True)
class Document:
    """One report in words, ready for any renderer."""

    title: str
    verdict: str
    headline: str
    why: str
    next: str
    findings: tuple[FindingText, ...]
    tables: tuple[WeightTable, ...]
    tables_left_out: int
    coverage: tuple[str, ...]
    rules: tuple[RuleText, ...]


def build(report: Report) -> Document:
    """The words and tables of a report."""
    tables, left_out = weight_tables(report)
    findings = tuple(_finding(finding) for finding in report.findings)
    return Document(
        title=_title(report),
        verdict=report.verdict,
        headline=_headline(report, findings),
        why=_why(report),
        next=_next(report),
        findings=findings,
        tables=tuple(tables),
        tables_left_out=left_out,
        coverage=tuple(_coverage(report)),
        rules=_rules(report),
    )


def scenario_summary(report: ScenarioReport) -> tuple[str, list[str]]:
    """One sentence about a scenario's result and a line a variant."""
    right = sum(variant.as_expected for variant in report.variants)
    sentence = (
        f"{printable(report.scenario)}: {right} of {plural(len(report.variants), 'variant')} as the scenario says"
    )
    return sentence, [variant_line(variant) for variant in report.variants]


def variant_line(variant: VariantReport) -> str:
    """A variant, what was found in it and whether its file says so."""
    if variant.report is None:
        found = "could not be judged"
    elif variant.report.findings:
        found = "found " + "; ".join(_sentence(finding) for finding in variant.report.findings[:3])
    else:
        found = {"clean": "clean", "undetermined": "could not be judged"}.get(variant.report.verdict, "findings")
    agreement = f"NOT AS EXPECTED: {prose(variant.mismatch)}"
    if variant.as_expected:
        agreement = prose(variant.mismatch) if variant.mismatch else "as expected"
    return f"{printable(variant.variant)}: {found} ({agreement})"


def _title(report: Report) -> str:
    run = report.run
    name = " ".join(printable(part) for part in (run.scenario, run.variant) if part) or printable(run.id)
    axes = " ".join(f"{printable(axis)}={degree}" for axis, degree in run.axes.items() if degree > 1)
    facts = [plural(run.world_size, "rank"), axes, printable(run.dtype), f"objective {printable(run.objective)}"]
    return f"{name} ({', '.join(fact for fact in facts if fact)})"


def _headline(report: Report, findings: tuple[FindingText, ...]) -> str:
    word = VERDICT_WORDS[report.verdict]
    if report.verdict == "findings" and findings:
        more = f" (and {plural(len(findings) - 1, 'more finding')})" if len(findings) > 1 else ""
        return f"{word} {findings[0].title}: {findings[0].factor}{more}"
    if report.verdict == "clean":
        remarks = f" (and {plural(len(findings), 'remark')})" if findings else ""
        return f"{word}: every token weighs what the objective {printable(report.run.objective)} says{remarks}"
    return f"{word}: {prose(report.reasons[0]) if report.reasons else 'see the coverage below'}"


def _why(report: Report) -> str:
    if report.verdict == "findings" and report.findings:
        return prose(report.findings[0].explanation)
    ratios = [weight.ratio for weight in report.weights if weight.ratio is not None]
    worst = max((abs(ratio - 1) for ratio in ratios), default=None)
    coverage = report.coverage
    seen = (
        f"{plural(len(ratios), 'observed weight')} in {coverage.parameters_observed} of "
        f"{plural(coverage.parameters_total, 'parameter')}"
    )
    largest = f"the largest relative difference is {number(worst, 2)}." if worst is not None else ""
    if report.verdict == "clean":
        return f"{seen} agree with the expected ones" + (f"; {largest}" if largest else ".")
    # The first reason is the headline.
    sentences = [f"{reason[:1].upper()}{reason[1:].rstrip('.')}." for reason in report.reasons[1:]]
    if not report.reasons:
        return "The trace does not hold what a judgement needs."
    return prose(
        " ".join([f"Compared were {seen}; {largest}" if ratios else "No weight could be compared.", *sentences])
    )


def _next(report: Report) -> str:
    if report.verdict == "findings" and report.findings:
        finding = report.findings[0]
        if _rivals(finding) and finding.suggested_experiment:
            return prose(f"{finding.fix} But first: {finding.suggested_experiment}")
        return prose(finding.fix)
    if report.next_step:
        return prose(report.next_step)
    if report.verdict == "clean":
        return "Nothing to mend. Record again after a change of mesh, accumulation or loss."
    return "Read the problems under coverage, then record the run again."


def _finding(finding: Finding) -> FindingText:
    facts = [prose(line) for line in finding.consequence.split("\n")[:MAX_CONSEQUENCES] if line]
    others = _rivals(finding)
    if others:
        facts.append("also explained by " + "; ".join(_candidate(other) for other in others[:3]))
    if finding.suggested_experiment:
        facts.append("to tell apart: " + prose(finding.suggested_experiment))
    steps = finding.steps or [finding.step]
    # An auxiliary loss term concerns whatever lies before it, which no trace tells.
    concerned = (
        f"{plural(finding.num_parameters, 'parameter')} ({some(finding.units)})" if finding.units else "the term"
    )
    if finding.units and not finding.num_parameters:  # by what was recorded of a step, not parameter by parameter
        concerned = some(finding.units)
    where = f"{concerned} on ranks {spans(finding.ranks)}, step {spans(steps)}"
    return FindingText(
        code=printable(finding.code, 80),
        name=printable(finding.name, 80),
        severity=printable(finding.severity, 20),
        title=f"{printable(finding.code)} {printable(finding.name)}",
        factor=_factor(finding),
        where=where,
        explanation=prose(finding.explanation),
        fix=prose(finding.fix),
        facts=tuple(facts),
        culprit=culprit(finding.first_event) if finding.first_event else None,
    )


def _rivals(finding: Finding) -> list[Candidate]:
    """Explanations that fit as well as the one that names the finding."""
    return [other for other in finding.factor.candidates if other.expression != finding.factor.expression]


def _candidate(candidate: Candidate) -> str:
    evidence = f" ({prose(candidate.evidence, 200)})" if candidate.evidence else ""
    return f"{printable(candidate.expression)} = {number(candidate.value)}{evidence}"


_VARYING = ("K-1-k", "repetitions", "n_c", "N_r", "N_k", "L_c", "(k+1)", "(K-k)", "(m+1)", "(r+1)")


def _factor(finding: Finding) -> str:
    factor = finding.factor
    expression = printable(factor.expression) if factor.expression else None
    pattern = f" ({prose(finding.pattern, 300)})" if finding.pattern else ""
    if factor.observed is None and expression is None and pattern:
        return prose(finding.pattern, 300)
    if factor.observed is None:
        return f"observed / expected = {expression or 'unknown'}{pattern}"
    if expression and any(symbol in expression for symbol in _VARYING):
        # It differs between contributions: no one number stands for it, the pattern gives them.
        return f"observed / expected = {expression}{pattern}"
    name = f" = {expression}" if expression else ""
    if finding.code == WRONG_BACKWARD:  # no weight of a contribution, and the pattern says it
        return prose(finding.pattern, 300)
    return f"observed / expected = {number(factor.observed)}{name}{pattern}"


def _sentence(finding: Finding) -> str:
    factor = finding.factor
    name = factor.expression or number(factor.observed)
    return f"{printable(finding.code)} {printable(finding.name)}, factor {printable(name)}"


def culprit(event: FirstEvent) -> Culprit:
    """The culprit event in words, with its source where it may be shown."""
    place = f"{short_path(event.file)}:{event.line}" if event.file else "no source line was recorded"
    group = f" over group [{spans(event.group)}]" if event.group else ""
    operation = f" {printable(event.op)}" if event.op else ""
    where = [f"rank {event.rank}"]
    where += [f"accumulation step {event.accumulation_step}"] if event.accumulation_step is not None else []
    where += [f"microbatch {event.microbatch}"] if event.microbatch is not None else []
    where += [f"stage {event.stage}"] if event.stage is not None else []
    facts = ["first on " + ", ".join(where)]
    factors = {"documented": event.nominal_factor, "measured": event.observed_factor}
    told = [f"{number(factor)} as {how}" for how, factor in factors.items() if factor is not None]
    if told:
        facts.append(f"multiplies by {', '.join(told)}")
    if event.called_from:
        file, colon, line = event.called_from.rpartition(":")
        facts.append(f"called from {short_path(file)}{colon}{printable(line)}")
    if event.configured_at:
        file, colon, line = event.configured_at.rpartition(":")
        facts.append(f"configured at {short_path(file)}{colon}{printable(line)}")
    if event.unrecorded:
        behind = printable(str((event.before or {}).get("kind", "the next recorded event")))
        facts.append(f"nothing that was recorded did it: it happened after this event and before {behind}")
    line = f"{place}  {printable(event.kind)}{operation}{group}"
    path = short_path(event.file) if event.file else None
    return Culprit(line, tuple(facts), excerpt(event.file, event.line), path, max(1, event.line or 1))


def _rules(report: Report) -> tuple[RuleText, ...]:
    outcomes = dict.fromkeys(report.rules.not_triggered, "not triggered")
    outcomes |= dict.fromkeys(report.rules.passed, "passed")
    outcomes |= dict.fromkeys([*report.rules.failed, *(finding.code for finding in report.findings)], "failed")
    found = {finding.code: finding.name for finding in report.findings}
    return tuple(_rule(code, found.get(code), outcome) for code, outcome in sorted(outcomes.items()))


def _rule(code: str, found: str | None, outcome: str) -> RuleText:
    known = find_rule(code)
    name = found if found is not None else known.NAME if known else code
    summary = (known.__doc__ or "").partition("\n")[0] if known else ""
    return RuleText(printable(code, 80), printable(name, 80), summary, outcome)


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


def _coverage(report: Report) -> list[str]:
    coverage, lines = report.coverage, []
    lines.append(f"{coverage.parameters_observed} of {plural(coverage.parameters_total, 'parameter')} observed")
    if coverage.unidentifiable:
        names = [f"{entry.parameter} ({entry.reason})" for entry in coverage.unidentifiable]
        lines.append(f"unidentifiable: {some(names, 3, 160)}")
    if coverage.probes_active:
        lines.append(f"probes: {some(coverage.probes_active, 20)}")
    if coverage.probes_missing:
        missing = [f"{entry.probe} ({entry.reason})" for entry in coverage.probes_missing]
        lines.append(f"probes that could not hook: {some(missing, 5, 160)}")
    lines += [f"problem: {prose(problem, 300)}" for problem in coverage.problems[:10]]
    if len(coverage.problems) > 10:
        lines.append(f"and {plural(len(coverage.problems) - 10, 'more problem')}")
    lines += [prose(note, 300) for note in coverage.notes[:10]]
    lines += _unverified(coverage.unverified)
    rules = report.rules
    outcomes = {"failed": rules.failed, "passed": rules.passed, "not triggered": rules.not_triggered}
    told = [f"{word} {some(codes, 12)}" for word, codes in outcomes.items() if codes]
    if told:
        lines.append("rules: " + "; ".join(told))
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
            lines.append(f"{what} {printable(value)}: {prose(source, 200)}")
    return lines

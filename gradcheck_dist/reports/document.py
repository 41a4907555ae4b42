"""What every format says, said once: verdict, where, why, next, the culprit, the weight tables, the coverage."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gradcheck_dist.diagnosis.finding import Candidate, Finding, Report, ScenarioReport, VariantReport
from gradcheck_dist.diagnosis.rules import find_rule
from gradcheck_dist.reports.coverage import coverage_lines
from gradcheck_dist.reports.culprit import Culprit, culprit, units_of, whereabouts
from gradcheck_dist.reports.text import number, printable, prose, some, spans
from gradcheck_dist.reports.weights import WeightTable, weight_tables
from gradcheck_dist.wording import plural, sentence

MAX_CONSEQUENCES = 8
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
OF_STEPS = re.compile(r"^steps? [\d, toand]+: ")
MIN_HEADLINE, MAX_HEADLINE = 20, 140
"""Characters of a reason that are read at a glance."""
UNIFORM = "every contribution"
UNEXPLAINED, WRONG_BACKWARD = "GS000", ("GS801", "GS802")
COUNTS = {
    "num_tokens": "tokens of the step on all ranks",
    "contributions": "losses of the step on all ranks",
    "R": "data ranks",
    "n_c": "tokens of the microbatch",
    "N_r": "tokens of the data rank in the step",
    "N_k": "tokens of the accumulation step",
    "L_c": "labels of the microbatch, padding included",
    "T_c": "labels of one of its rows, padding included",
}
"""What a factor's short names stand for; its others are words."""
VERDICT_WORDS = {"clean": "CLEAN", "findings": "FOUND", "undetermined": "COULD NOT JUDGE"}


@dataclass(frozen=True)
class FindingText:
    """One finding in words. `code`, `name` and `severity` are for programs that read the report; `facts` begin with the
    `consequences` for this run."""

    code: str
    name: str
    severity: str
    title: str
    factor: str
    where: str
    explanation: str
    fix: str
    consequences: tuple[str, ...]
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
    where: str
    why: str
    next: str
    findings: tuple[FindingText, ...]
    tables: tuple[WeightTable, ...]
    tables_left_out: int
    coverage: tuple[str, ...]
    rules: tuple[RuleText, ...]

    @property
    def answer(self) -> list[tuple[str, str]]:
        """What stands below the headline, label by label: at which line, why, and what to do now."""
        told = (("where", self.where), ("why", self.why), ("next", self.next))
        return [(label, text) for label, text in told if text]


def build(report: Report) -> Document:
    """The words and tables of a report."""
    tables, left_out = weight_tables(report)
    findings = tuple(_finding(finding, report.coverage.parameters_total) for finding in report.findings)
    return Document(
        title=_title(report),
        verdict=report.verdict,
        headline=_headline(report, findings),
        where=whereabouts(report),
        why=_why(report),
        next=_next(report),
        findings=findings,
        tables=tuple(tables),
        tables_left_out=left_out,
        coverage=tuple(coverage_lines(report)),
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
        counted = "sequence" if report.run.objective == "sequence-mean" else "token"
        return f"{word}: every {counted} weighs what the objective {printable(report.run.objective)} says{remarks}"
    return f"{word}: {_in_two(report.reasons[0])[0] if report.reasons else 'see the coverage below'}"


def _why(report: Report) -> str:
    if report.verdict == "findings" and report.findings:
        return prose(report.findings[0].explanation)
    ratios = [weight.ratio for weight in report.weights if weight.ratio is not None]
    worst = max((abs(ratio - 1) for ratio in ratios), default=None)
    num_weights = sum(len(weight.ranks) for weight in report.weights if weight.ratio is not None)
    coverage = report.coverage
    seen = (
        f"{plural(num_weights, 'observed weight')} in {coverage.parameters_observed} of "
        f"{plural(coverage.parameters_total, 'parameter')}"
    )
    largest = f"the largest relative difference is {number(worst, 2)}." if worst is not None else ""
    if report.verdict == "clean":
        agree = "agrees with the expected one" if num_weights == 1 else "agree with the expected ones"
        return f"{seen} {agree}" + (f"; {largest}" if largest else ".")
    if not report.reasons:
        return "The trace does not hold what a judgement needs."
    # What the first reason begins with is the headline.
    alike = {_but_numbers(reason): reason for reason in reversed(report.reasons)}
    shown = [reason for reason in report.reasons if alike[_but_numbers(reason)] is reason]
    rest = [part for part in (_in_two(shown[0])[1], *shown[1:]) if part]
    sentences = [f"{sentence(reason).rstrip('.')}." for reason in rest]
    if num_more := len(report.reasons) - len(shown):
        differ = "differs" if num_more == 1 else "differ"
        sentences.append(f"{plural(num_more, 'more reason')} {differ} from these in numbers alone (--format json).")
    compared = (
        f"{seen} {'was' if num_weights == 1 else 'were'} compared; {largest}"
        if ratios
        else "No weight could be compared."
    )
    return prose(" ".join([*sentences, compared]))


def _but_numbers(reason: str) -> str:
    return NUMBER.sub("", OF_STEPS.sub("", reason))


def _in_two(reason: str) -> tuple[str, str]:
    """A reason that is too long for a headline, parted behind its first clause; one that is short enough whole."""
    text = prose(reason)
    if len(text) <= MAX_HEADLINE:
        return text, ""
    for match in re.finditer(r"(?:[:;]|(?<=[\w)])\.) ", text[: 2 * MAX_HEADLINE]):
        head = text[: match.start()]
        if len(head) >= MIN_HEADLINE and head.count("(") == head.count(")") and head.count("`") % 2 == 0:
            return head, text[match.end() :]
    return text, ""


def _next(report: Report) -> str:
    if report.verdict == "findings" and report.findings:
        finding = report.findings[0]
        if _rivals(finding) and finding.suggested_experiment:
            return prose(f"{finding.fix} But first: {finding.suggested_experiment}")
        return prose(finding.fix)
    if report.next_step:
        return prose(report.next_step)
    if report.verdict == "clean":
        return "Nothing to fix. Record again after a change of mesh, accumulation or loss."
    return "Read the problems under coverage, then record the run again."


def _finding(finding: Finding, total: int) -> FindingText:
    consequences = [prose(line) for line in finding.consequence.split("\n")[:MAX_CONSEQUENCES] if line]
    facts = [*consequences]
    others = _rivals(finding)
    if others:
        facts.append("also explained by " + "; ".join(_candidate(other) for other in others[:3]))
    if finding.suggested_experiment:
        facts.append(("to tell apart: " if others else "to learn more: ") + prose(finding.suggested_experiment))
    if counts := [f"{name} = {what}" for name, what in COUNTS.items() if name in _names(finding)]:
        facts.append("in the factor: " + ", ".join(counts))
    steps = finding.steps or [finding.step]
    # An auxiliary loss term, or an exchange, concerns whatever lies before it, which no trace tells.
    concerned = (
        f"{plural(finding.num_parameters, 'parameter')} ({units_of(finding, total)})"
        if finding.units
        else "activations"
        if finding.code in WRONG_BACKWARD
        else "the term"
    )
    if finding.units and not finding.num_parameters:  # by what was recorded of a step, not parameter by parameter
        concerned = some(finding.units)
    steps_word = "step" if len(steps) == 1 else "steps"
    ranks_word = "rank" if len(finding.ranks) == 1 else "ranks"
    where = f"{concerned} on {ranks_word} {spans(finding.ranks)}, {steps_word} {spans(steps)}"
    return FindingText(
        code=printable(finding.code, 80),
        name=printable(finding.name, 80),
        severity=printable(finding.severity, 20),
        title=f"{printable(finding.code)} {printable(finding.name)}",
        factor=_factor(finding),
        where=where,
        explanation=prose(finding.explanation),
        fix=prose(finding.fix),
        consequences=tuple(consequences),
        facts=tuple(facts),
        culprit=culprit(finding.first_event) if finding.first_event else None,
    )


def _names(finding: Finding) -> list[str]:
    return re.findall(r"\w+", finding.factor.expression or "")


def _rivals(finding: Finding) -> list[Candidate]:
    """Explanations that fit as well as the one that names the finding."""
    return [other for other in finding.factor.candidates if other.expression != finding.factor.expression]


def _candidate(candidate: Candidate) -> str:
    evidence = f" ({prose(candidate.evidence, 200)})" if candidate.evidence else ""
    return f"{printable(candidate.expression)} = {number(candidate.value)}{evidence}"


_VARYING = ("K-1-k", "repetitions", "n_c", "N_r", "N_k", "L_c", "T_c", "(k+1)", "(K-k)", "(m+1)", "(r+1)")


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
    if not expression and factor_name(finding) != number(factor.observed):  # one of several would pass for all
        return f"observed / expected: {factor_name(finding)}"
    name = f" = {expression}" if expression else ""
    if expression and finding.code == UNEXPLAINED:  # elsewhere the rule has said which it is
        name += "".join(f" or {printable(other.expression)}" for other in _rivals(finding)[:1])
    if finding.code in WRONG_BACKWARD:  # no weight of a contribution, and the pattern says it
        return prose(finding.pattern, 300)
    return f"observed / expected = {number(factor.observed)}{name}{pattern}"


def factor_name(finding: Finding) -> str:
    """The factor in a word or two: its name, its number, or what it does to whom where it is several numbers."""
    factor = finding.factor
    several = " x " in finding.pattern and not finding.pattern.startswith(UNIFORM)
    return factor.expression or (prose(finding.pattern, 300) if several else number(factor.observed))


def _sentence(finding: Finding) -> str:
    name = factor_name(finding)
    return f"{printable(finding.code)} {printable(finding.name)}, factor {printable(name)}"


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

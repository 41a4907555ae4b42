"""A report as JUnit XML, as CI servers read it: one test case a rule, one failure a finding."""

from __future__ import annotations

from xml.etree import ElementTree

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
from gradcheck_dist.reports.document import Document, FindingText, build
from gradcheck_dist.reports.text import printable

SUITE = "gradcheck"


def render(report: Report) -> str:
    """One run's report as one test suite."""
    return _write([_suite(build(report), SUITE)])


def render_scenario(report: ScenarioReport) -> str:
    """A scenario's reports, one test suite a variant."""
    return _write(
        [
            _suite(build(variant.report), f"{SUITE}.{printable(variant.variant, 80)}")
            for variant in report.variants
            if variant.report is not None
        ]
    )


def _write(suites: list[ElementTree.Element]) -> str:
    root = ElementTree.Element("testsuites", name=SUITE)
    root.extend(suites)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(document: Document, name: str) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=name)
    for rule in document.rules:
        code, outcome = rule.code, rule.outcome
        findings = [finding for finding in document.findings if finding.code == code]
        title = f"{code} {rule.name}"
        case = ElementTree.SubElement(suite, "testcase", classname=f"{name}.rules", name=title)
        for finding in findings[:1]:
            found = ElementTree.SubElement(case, "failure", type=finding.title, message=finding.factor)
            found.text = "\n\n".join(_text(one) for one in findings)
        if outcome == "failed" and not findings:
            ElementTree.SubElement(case, "failure", type=code, message="failed; the report holds no finding of it")
        if outcome == "not triggered":
            ElementTree.SubElement(case, "skipped", message="this run has nothing that the rule judges")
    # A run that could not be judged must not look green because no rule failed.
    verdict = ElementTree.SubElement(suite, "testcase", classname=f"{name}.verdict", name="could be judged")
    if document.verdict == "undetermined":
        error = ElementTree.SubElement(verdict, "error", type="undetermined", message=document.headline)
        error.text = "\n".join([document.why, document.next, *document.coverage])
    output = ElementTree.SubElement(suite, "system-out")
    output.text = "\n".join([document.title, document.headline, *document.coverage])
    for attribute, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f".//{tag}"))))
    return suite


def _text(finding: FindingText) -> str:
    lines = [f"{finding.title}: {finding.factor}", finding.where, finding.explanation, f"fix: {finding.fix}"]
    lines += finding.facts
    if finding.culprit is not None:
        lines += [finding.culprit.line, *finding.culprit.facts]
    return "\n".join(lines)

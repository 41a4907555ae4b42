"""A report as SARIF 2.1.0 (OASIS), as code hosts and editors read it: one result a finding, on the user's line."""

from __future__ import annotations

import json
from typing import Any

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
from gradcheck_dist.reports.document import Document, FindingText, RuleText, build
from gradcheck_dist.reports.locations import repository_path, uri
from gradcheck_dist.reports.text import printable

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def render(report: Report) -> str:
    """One run's report as a SARIF log."""
    return _log([_run(report)])


def render_scenario(report: ScenarioReport) -> str:
    """A scenario's reports as one SARIF log, one run a variant."""
    return _log([_run(variant.report, variant.variant) for variant in report.variants if variant.report is not None])


def _log(runs: list[dict[str, Any]]) -> str:
    return json.dumps({"$schema": SCHEMA_URI, "version": "2.1.0", "runs": runs}, indent=1) + "\n"


def _run(report: Report, variant: str | None = None) -> dict[str, Any]:
    document = build(report)
    codes = [rule.code for rule in document.rules]
    driver = {
        "name": printable(report.tool.name, 80),
        "version": printable(report.tool.version, 80),
        "rules": [_rule(rule) for rule in document.rules],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, codes) for finding in document.findings],
        "invocations": [_invocation(document)],
        "properties": {"verdict": document.verdict, "title": document.title},
    }
    if variant is not None:
        run["automationDetails"] = {"id": f"gradcheck/{printable(variant, 80)}/"}
    return run


def _rule(rule: RuleText) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary or rule.name},
        "help": {"text": f"gradcheck explain {rule.code}"},
        "properties": {"outcome": rule.outcome},
    }


def _result(finding: FindingText, codes: list[str]) -> dict[str, Any]:
    parts = [f"{finding.title}: {finding.factor}.", finding.explanation, f"Fix: {finding.fix}", finding.where]
    parts += finding.facts
    if finding.culprit is not None:
        parts += [finding.culprit.line, *finding.culprit.facts]
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": _LEVELS.get(finding.severity, "warning"),
        "message": {"text": "\n".join(parts)},
    }
    path = repository_path(finding.culprit)
    if finding.culprit is not None and path is not None:
        place = {
            "artifactLocation": {"uri": uri(path)},
            "region": {"startLine": finding.culprit.line_number},
        }
        result["locations"] = [{"physicalLocation": place}]
        result["partialFingerprints"] = {"gradcheck/v1": f"{finding.code}:{uri(path)}:{finding.culprit.line_number}"}
    return result


def _invocation(document: Document) -> dict[str, Any]:
    """Whether the judgement itself came to an end; what it could not see stands as notifications."""
    level = "error" if document.verdict == "undetermined" else "note"
    notes = [document.headline, *document.coverage]
    return {
        "executionSuccessful": document.verdict != "undetermined",
        "toolExecutionNotifications": [{"level": level, "message": {"text": note}} for note in notes],
    }

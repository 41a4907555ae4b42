"""A report as workflow commands of GitHub Actions: annotations on the user's source lines, in the log and in the diff.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions says how values are escaped.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
from gradcheck_dist.reports.document import Document, FindingText, build
from gradcheck_dist.reports.locations import repository_path
from gradcheck_dist.reports.text import clip

MAX_ANNOTATIONS = 10
"""GitHub shows so many of a kind a step; the rest would be dropped without a word."""
MAX_MESSAGE = 4000
_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def render(report: Report) -> str:
    """One run's report, a line an annotation."""
    return "\n".join(_lines(build(report))) + "\n"


def render_scenario(report: ScenarioReport) -> str:
    """A scenario's reports one after the other, each folded under its variant."""
    lines: list[str] = []
    for variant in report.variants:
        if variant.report is not None:
            document = build(variant.report)
            lines += [f"::group::{_data(document.title)}", *_lines(document), "::endgroup::"]
    return "\n".join(lines) + "\n"


def _lines(document: Document) -> list[str]:
    if not document.findings:
        command = "notice" if document.verdict == "clean" else "warning"
        return [_command(command, {"title": "gradcheck"}, f"{document.headline}\n{document.why}\n{document.next}")]
    lines = [_annotation(finding) for finding in document.findings[:MAX_ANNOTATIONS]]
    rest = document.findings[MAX_ANNOTATIONS:]
    # Beyond what GitHub shows as annotations: as text in the log, where it cannot be a command.
    return lines + [_data(f"gradcheck: {finding.title}: {finding.factor}; {finding.where}") for finding in rest]


def _annotation(finding: FindingText) -> str:
    properties = {"title": f"gradcheck: {finding.title}"}
    path = repository_path(finding.culprit)
    if finding.culprit is not None and path is not None:
        properties |= {"file": path, "line": str(finding.culprit.line_number)}
    parts = [finding.factor, finding.explanation, f"Fix: {finding.fix}", finding.where, *finding.facts]
    if finding.culprit is not None:
        parts.append(f"Culprit: {finding.culprit.line}")
    return _command(_COMMANDS.get(finding.severity, "warning"), properties, "\n".join(parts))


def _command(name: str, properties: dict[str, str], message: str) -> str:
    fields = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name} {fields}::{_data(clip(message, MAX_MESSAGE))}"


def _data(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")

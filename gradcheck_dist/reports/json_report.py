"""Reports as JSON, in the published schema, and back."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import msgspec

from gradcheck_dist.diagnosis.finding import REPORT_SCHEMA_VERSION, Report, ScenarioReport
from gradcheck_dist.errors import GradcheckError

SCHEMA_FILE = "report.schema.json"


def encode(report: Report | ScenarioReport) -> bytes:
    """The report as indented UTF-8 JSON, ending with a line break."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def decode(data: bytes, name: str = "the report") -> Report | ScenarioReport:
    """The report that `data` holds; `name` says in messages where it came from.

    Raises:
        GradcheckError: E701 no report, E702 of another schema version.
    """
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_report(name, str(error)) from error
    if not isinstance(content, dict):
        raise _no_report(name, f"it holds {type(content).__name__}, not an object")
    version = content.get("schema_version")
    if version != REPORT_SCHEMA_VERSION:
        raise GradcheckError(
            f"{name} has report schema version {version!r}; this gradcheck reads version {REPORT_SCHEMA_VERSION}. "
            "Read it with the gradcheck that wrote it, or judge its run folder again.",
            code="E702",
        )
    kind: type[Report | ScenarioReport] = ScenarioReport if "scenario" in content else Report
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise _no_report(name, str(error)) from error


def _no_report(name: str, reason: str) -> GradcheckError:
    return GradcheckError(
        f"{name} is no gradcheck report: {reason}. Name a run folder, or a file written by "
        "`gradcheck report --format json` or `gradcheck scenario --report`.",
        code="E701",
    )


def build_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of both documents, made from the model."""
    references, components = msgspec.json.schema_components([Report, ScenarioReport], ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gradcheck report",
        "description": "The diagnosis of one run (Report), or one such diagnosis a variant (ScenarioReport).",
        "anyOf": list(references),
        "$defs": dict(sorted(components.items())),
    }


def published_schema() -> dict[str, Any]:
    """The schema as it is shipped and frozen."""
    content = resources.files(__package__).joinpath(SCHEMA_FILE).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(content)
    return schema


def schema_text() -> str:
    """`build_schema` as the text of the shipped file: `python -m gradcheck_dist.reports.json_report > FILE`."""
    return json.dumps(build_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")

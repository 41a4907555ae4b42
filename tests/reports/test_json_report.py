"""The JSON report: what scripts and pull requests rely on."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest
from sample_reports import finding, report, weight

from gradcheck_dist.diagnosis.finding import Factor, ScenarioReport, Tool, VariantReport
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports import json_report

# Names of DESIGN section 8: more may be added, none renamed.
PUBLISHED = {
    "Report": "schema_version tool run verdict findings rules coverage units weights overhead",
    "RunInfo": "id command world_size torch_version device_type axes objective steps",
    "Finding": "code name severity step factor pattern units num_parameters ranks first_event explanation fix "
    "suggested_experiment",
    "Factor": "observed exact expression candidates",
    "FirstEvent": "rank seq kind op group file line",
    "RuleOutcomes": "passed failed not_triggered",
    "Coverage": "parameters_total parameters_observed unidentifiable probes_active probes_missing",
    "UnitInfo": "unit parameters",
    "Weight": "step unit holder_rank contribution num_tokens expected expected_exact nominal observed ratio",
    "ContributionKey": "data_rank accumulation_step microbatch",
    "Overhead": "probe_s_per_step share_of_step trace_bytes_per_step",
    "VariantReport": "variant expected_finding report",
    "ScenarioReport": "scenario variants",
}


def scenario_report() -> ScenarioReport:
    variant = VariantReport(variant="averaging", expected_finding=None, report=report(), as_expected=False)
    return ScenarioReport(tool=Tool(version="0"), scenario="ddp-accum", as_expected=False, variants=[variant])


def test_the_shipped_schema_is_that_of_the_model() -> None:
    hint = "python -m gradcheck_dist.reports.json_report > gradcheck_dist/reports/report.schema.json"
    assert json_report.published_schema() == json_report.build_schema(), hint


@pytest.mark.parametrize("struct", PUBLISHED)
def test_published_names_stay(struct: str) -> None:
    properties = json_report.published_schema()["$defs"][struct]["properties"]
    assert set(PUBLISHED[struct].split()) <= set(properties)


@pytest.mark.parametrize("document", [report(), report([]), scenario_report()])
def test_a_report_agrees_with_the_schema_and_comes_back_whole(document: Any) -> None:
    encoded = json_report.encode(document)
    jsonschema.validate(json.loads(encoded), json_report.published_schema())
    assert json_report.decode(encoded) == document


def test_the_schema_refuses_a_report_without_a_verdict() -> None:
    content = json.loads(json_report.encode(report()))
    del content["verdict"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, json_report.published_schema())


def test_a_number_that_is_none_is_null_and_the_file_stays_json() -> None:
    document = report([finding(factor=Factor(observed=math.inf))], [weight(0, 0, math.nan)])
    content = json.loads(json_report.encode(document))
    assert content["findings"][0]["factor"]["observed"] is None
    assert content["weights"][0]["ratio"] is None


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xff\x00", "E701"),
        (b"[]", "E701"),
        (b"{", "E701"),
        (b'{"schema_version": 1}', "E701"),
        (b'{"schema_version": 99}', "E702"),
        (b"[" * 100_000, "E701"),
    ],
)
def test_what_is_no_report_is_refused_by_name(data: bytes, code: str) -> None:
    with pytest.raises(GradcheckError, match="verdicts\\.json") as caught:
        json_report.decode(data, "verdicts.json")
    assert caught.value.code == code

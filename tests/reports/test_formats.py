"""Every format from one document: nothing that is found is lost, nothing that is named acts."""

from __future__ import annotations

import json
import re
import time
from xml.etree import ElementTree

import pytest
from hostile import ATTACK, MEGABYTE, PATHS, hostile_report
from sample_reports import finding, first_event, report

from gradcheck_dist.diagnosis.finding import Coverage, Factor, Report, RuleOutcomes, ScenarioReport, Tool, VariantReport
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports import formats, plain
from gradcheck_dist.reports.document import build

FORMATS = sorted(formats.MODULES)


def written(judged: Report, form: str) -> str:
    """A report without plotly.js, which is the same in all of them."""
    return formats.write(judged, form, plotlyjs="shared") if form == "html" else formats.write(judged, form)


@pytest.mark.parametrize("form", FORMATS)
def test_a_finding_that_is_added_to_the_model_appears_in_every_format(form: str) -> None:
    new = finding(
        code="GS999",
        name="brand-new-pattern",
        factor=Factor(observed=3.0, expression="3*novel"),
        explanation="Never seen before.",
        fix="Mend the novelty.",
    )
    text = written(report([finding(), new]), form).replace("\\*", "*")
    for told in ("GS999", "brand-new-pattern", "3*novel", "Never seen before.", "Mend the novelty."):
        assert told in text


def test_it_appears_on_the_terminal_too() -> None:
    text = plain.render(build(report([finding(), finding(code="GS999", name="brand-new-pattern")])))
    assert "GS999 brand-new-pattern" in text


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("verdict", ["clean", "undetermined"])
def test_every_format_tells_a_verdict_without_findings(form: str, verdict: str) -> None:
    judged = report([], verdict=verdict, reasons=["rank 3 is missing"] if verdict == "undetermined" else [])
    text = written(judged, form)
    if form == "json":
        assert json.loads(text)["verdict"] == verdict
    elif verdict == "undetermined":
        assert "rank 3 is missing" in text
    else:
        assert "CLEAN" in text


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_holds_all_variants_of_a_scenario(form: str) -> None:
    variants = [
        VariantReport(variant=name, expected_finding=None, report=report([finding(code=code)]), as_expected=True)
        for name, code in (("first-one", "GS991"), ("second-one", "GS992"))
    ]
    document = ScenarioReport(tool=Tool(version="0"), scenario="two", as_expected=True, variants=variants)
    text = formats.write(document, form)
    assert "GS991" in text
    assert "GS992" in text


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(GradcheckError, match=r"'htm'.*html") as caught:
        formats.write(report(), "htm")
    assert caught.value.code == "E703"


@pytest.mark.parametrize("form", [*FORMATS, "plain"])
def test_no_control_character_leaves_any_format(form: str) -> None:
    text = plain.render(build(hostile_report())) if form == "plain" else written(hostile_report(), form)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ufffe\ud800]", text)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "json"])
def test_a_name_of_a_megabyte_is_cut(form: str) -> None:
    started = time.perf_counter()
    assert len(written(hostile_report(MEGABYTE), form)) < 200_000
    assert time.perf_counter() - started < 5


def test_hostile_names_are_no_elements_of_a_page() -> None:
    text = written(hostile_report(), "html")
    body = re.sub(r"<style>.*?</style>", "", text, flags=re.S)
    assert "<img" not in body
    assert "<a " not in body
    scripts = re.findall(r"<script[^>]*>", body)
    assert {re.sub(r'id="[^"]*"', "", tag) for tag in scripts} <= {
        '<script type="application/json" >',
        "<script>",
    } | {tag for tag in scripts if tag.startswith('<script src="plotly-')}
    for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', body, re.S):
        assert "<" not in data
        for label in re.findall(r'"[^"]*img[^"]*"', json.dumps(json.loads(data))):
            assert "&lt;img" in label


def test_hostile_names_are_text_in_junit() -> None:
    root = ElementTree.fromstring(written(hostile_report(), "junit"))
    assert {element.tag for element in root.iter()} <= {
        *("testsuites", "testsuite", "testcase", "failure", "error", "skipped", "system-out")
    }


def test_hostile_names_are_no_commands_of_github() -> None:
    lines = written(hostile_report(), "github").splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("::error title=gradcheck%3A ")
    head = lines[0][2:].partition("::")[0]
    assert [field.partition("=")[0] for field in head.removeprefix("error ").split(",")] == ["title"]


@pytest.mark.parametrize("path", [*PATHS, ATTACK])
@pytest.mark.parametrize("form", ["sarif", "github"])
def test_no_annotation_points_outside_the_repository(path: str, form: str) -> None:
    text = written(report([finding(first_event=first_event(file=path, line=1))]), form)
    if form == "sarif":
        assert "locations" not in json.loads(text)["runs"][0]["results"][0]
    else:
        assert ",file=" not in text.splitlines()[0].partition("::")[2].partition("::")[0]


def test_annotations_stand_on_the_culprit_s_line() -> None:
    line = written(report(), "github").splitlines()[0]
    assert line.startswith("::error title=gradcheck%3A GS101 double-averaging,file=gradcheck_dist/errors.py,line=9::")


def test_an_annotation_of_several_lines_is_one_command() -> None:
    one = finding(explanation="weighs 50 % of it", fix="sum", suggested_experiment=None)
    lines = written(report([one]), "github").splitlines()
    message = lines[0].rpartition("::")[2]
    assert len(lines) == 1
    assert "%0Aweighs 50 %25 of it%0AFix: sum%0A" in message


def test_findings_beyond_what_github_shows_stay_in_the_log() -> None:
    many = [finding(code=f"GS{index}") for index in range(100, 125)]
    lines = written(report(many), "github").splitlines()
    assert len([line for line in lines if line.startswith("::")]) == 10
    assert len(lines) == 25


def test_junit_has_a_case_a_rule_and_one_for_the_verdict() -> None:
    judged = report(rules=RuleOutcomes(failed=["GS101"], passed=["GS102", "GS103"], not_triggered=["GS201"]))
    root = ElementTree.fromstring(written(judged, "junit"))
    suite = root.find("testsuite")
    assert suite is not None
    names = [case.get("name", "") for case in suite.iter("testcase")]
    assert [name.split()[0] for name in names] == ["GS101", "GS102", "GS103", "GS201", "could"]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped"), suite.get("errors")) == (
        "5",
        "1",
        "1",
        "0",
    )


def test_junit_is_red_when_nothing_could_be_judged() -> None:
    judged = report([], verdict="undetermined", reasons=["no loss was seen"], coverage=Coverage(problems=["torn"]))
    root = ElementTree.fromstring(written(judged, "junit"))
    error = root.find(".//error")
    assert error is not None
    assert "no loss was seen" in str(error.get("message"))
    assert "torn" in str(error.text)

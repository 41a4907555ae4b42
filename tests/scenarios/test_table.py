"""The table over several scenarios."""

from __future__ import annotations

import json

from sample_reports import report

from gradcheck_dist.diagnosis.finding import ExpectedFinding, ScenarioReport, Tool, VariantReport
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.scenarios import table
from gradcheck_dist.scenarios.runner import Cost, Result

EXPECTED = ExpectedFinding(code="GS101", name="double-averaging", factor="1/R", culprit="")


def result(*, note: str = "", unrun: bool = False) -> Result:
    faulty = VariantReport(
        variant="bad",
        expected_finding=EXPECTED,
        report=None if unrun else report(),
        as_expected=not note,
        mismatch=note,
    )
    twin = VariantReport(variant="fixed", expected_finding=None, report=report([]), as_expected=True)
    variants = [faulty] if unrun else [faulty, twin]
    document = ScenarioReport(tool=Tool(version="0"), scenario="demo", as_expected=not note, variants=variants)
    return Result(document, None, None, tuple(Cost(1.5, 3 << 20) for _ in variants))


def test_a_row_holds_what_was_found_where_and_what_it_cost() -> None:
    bad, fixed = table.rows(result())
    assert (bad.expected, bad.found, bad.factor) == (
        "GS101 double-averaging",
        "GS101 double-averaging",
        "1/dp_replicate",
    )
    assert bad.culprit.startswith("reduce ")
    assert (bad.seconds, bad.peak_memory_bytes, bad.as_expected) == (1.5, 3 << 20, True)
    assert (fixed.expected, fixed.found, fixed.factor, fixed.culprit) == ("clean", "clean", "", "")


def test_the_table_is_text_markdown_and_json() -> None:
    rows = [*table.rows(result()), table.refused("broken", GradcheckError("no such | thing <b> @all", code="E603"))]
    text = table.text(rows)
    assert "ok     1.5 s     3 MiB  demo bad: GS101 double-averaging (1/dp_replicate; reduce" in text
    assert f"NOT {'-':>18}  broken: could not run\n{'':24}E603: no such" in text
    assert text.splitlines()[-1] == "2 of 3 variants of 2 scenarios as the files say, in 3 s, at most 3 MiB at once"
    markdown = table.markdown(rows)
    assert "| demo | fixed | clean |  |  | 1.5 | 3 | yes |" in markdown
    assert "| **no**: E603: no such \\| thing &lt;b\\> @&#8203;all |" in markdown
    document = json.loads(table.document(rows))
    assert document["as_expected"] is False
    assert document["rows"][0]["seconds"] == 1.5
    assert [row["scenario"] for row in document["rows"]] == ["demo", "demo", "broken"]


def test_what_differs_from_the_file_stands_below_its_row() -> None:
    (row, *_) = table.rows(result(note="the verdict is clean, not findings", unrun=True))
    assert row.found is None
    assert list(table.lines([row]))[1].strip() == "the verdict is clean, not findings"

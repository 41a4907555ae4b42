"""gradcheck report in every format, pairs, golden files, export; on runs that the test writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line_doubles import Gradcheck
from sample_reports import report
from small_runs import write_run

from gradcheck_dist.cli import golden
from gradcheck_dist.cli.output import FileFormat
from gradcheck_dist.reports import formats
from gradcheck_dist.reports.golden import freeze


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "faulty", op="avg")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "fixed", op="sum")


def test_the_command_knows_the_formats_of_the_reports_and_no_other() -> None:
    assert {form.value for form in FileFormat} == set(formats.MODULES)


@pytest.mark.parametrize("form", list(FileFormat))
def test_every_format_is_written_to_stdout_and_to_a_file(
    gradcheck: Gradcheck, faulty: Path, tmp_path: Path, form: FileFormat
) -> None:
    shown = gradcheck("report", faulty, "--format", form.value)
    assert (shown.code, shown.err) == (0, "")
    assert "double-averaging" in shown.out
    gradcheck("report", faulty, "--format", form.value, "-o", tmp_path / "out")
    assert (tmp_path / "out").read_text() == shown.out


def test_the_file_s_name_tells_its_format_when_nothing_else_does(
    gradcheck: Gradcheck, faulty: Path, tmp_path: Path
) -> None:
    begins = {"a.html": "<!doctype html>", "a.sarif": "{", "a.xml": "<?xml", "a.json": "{", "a.md": "<!--", "a": "<!--"}
    for name, begin in begins.items():
        assert gradcheck("report", faulty, "-o", tmp_path / name).code == 0
        assert (tmp_path / name).read_text().startswith(begin)


def test_html_of_a_run_has_a_timeline_and_can_share_plotly_js(
    gradcheck: Gradcheck, faulty: Path, tmp_path: Path
) -> None:
    outcome = gradcheck("report", faulty, "--format", "html", "--plotlyjs", "shared", "-o", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert outcome.code == 0
    assert len(text) < 100_000
    assert 'data-figure="timeline"' in text
    script = re.search(r'<script src="([^"]+)"', text)
    assert script
    assert (tmp_path / script[1]).stat().st_size > 1_000_000


def test_a_shared_plotly_js_needs_a_folder(gradcheck: Gradcheck, faulty: Path) -> None:
    outcome = gradcheck("report", faulty, "--format", "html", "--plotlyjs", "shared")
    assert outcome.code == 2
    assert outcome.err.startswith("error E715: ")


@pytest.mark.parametrize(
    "arguments", [["report"], ["compare", "RUN"], ["matrix", "--only", "CP", "--report"]], ids=lambda words: words[0]
)
def test_a_file_whose_ending_is_no_format_is_refused_before_the_work(
    gradcheck: Gradcheck, faulty: Path, tmp_path: Path, arguments: list[str]
) -> None:
    file = tmp_path / "r.pdf"
    before = [faulty if word == "RUN" else word for word in arguments]
    rest = [file] if before[0] == "matrix" else [faulty, "--output", file]
    outcome = gradcheck(*before, *rest)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error E711: unknown ending of --") and ".json, .md" in outcome.err
    assert not file.exists()
    if before[0] != "matrix":
        assert gradcheck(*before, *rest, "--format", "md").code in (0, 1)
        assert file.read_text().startswith(("<!-- gradcheck -->", "#"))


@pytest.mark.parametrize("form", ["md", "html"])
def test_a_pair_shows_fault_and_fix(gradcheck: Gradcheck, faulty: Path, fixed: Path, form: str) -> None:
    outcome = gradcheck("report", "--before", faulty, "--after", fixed, "--format", form)
    assert outcome.code == 0
    assert "FIXED: GS101 double-averaging" in outcome.out
    two = gradcheck("report", "--before", faulty, "--after", fixed, "--before", fixed, "--after", fixed)
    assert "NOTHING TO FIX" in two.out


def test_pairs_need_two_sides_and_a_format_for_eyes(gradcheck: Gradcheck, faulty: Path, fixed: Path) -> None:
    for arguments in (
        [],
        ["--before", faulty],
        [faulty, "--before", faulty, "--after", fixed],
        ["--before", faulty, "--after", fixed, "--format", "sarif"],
    ):
        outcome = gradcheck("report", *arguments)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith("error E716: ")


def test_a_frozen_scale_fails_when_it_changes_and_tells_the_factor(
    gradcheck: Gradcheck, faulty: Path, fixed: Path, tmp_path: Path
) -> None:
    frozen = tmp_path / "scale.json"
    assert gradcheck("diagnose", fixed, "--export-golden", frozen).code == 0
    same = gradcheck("diagnose", fixed, "--golden", frozen)
    assert same.code == 0
    assert "golden: as frozen in" in same.err
    changed = gradcheck("diagnose", faulty, "--golden", frozen, "--format", "json")
    assert changed.code == 1
    assert "golden: weights x 0.5: 12 of 12" in changed.err
    assert json.loads(changed.out)["verdict"] == "findings"


def test_what_could_not_be_judged_is_neither_as_frozen_nor_changed(capsys: pytest.CaptureFixture[str]) -> None:
    frozen = freeze(report([]))
    unclear = report([], verdict="undetermined", reasons=["no loss was seen"])
    assert [golden.check(one, frozen, "scale.json") for one in (report([]), report(), unclear)] == [0, 1, 2]
    assert capsys.readouterr().err.splitlines()[-1] == "golden: could not be judged: no loss was seen"


def test_a_golden_file_that_is_missing_is_told_before_the_work(
    gradcheck: Gradcheck, fixed: Path, tmp_path: Path
) -> None:
    outcome = gradcheck("diagnose", fixed, "--golden", tmp_path / "none.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--export-golden" in outcome.err


@pytest.mark.parametrize("form", ["csv", "perfetto", "tensorboard"])
def test_export_prints_the_files_that_it_wrote(gradcheck: Gradcheck, fixed: Path, tmp_path: Path, form: str) -> None:
    outcome = gradcheck("export", fixed, "--format", form, "-o", tmp_path / "out")
    assert (outcome.code, outcome.err) == (0, "")
    assert all(Path(line).is_file() for line in outcome.out.splitlines())


def test_export_goes_below_the_run_when_nothing_is_said(gradcheck: Gradcheck, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert gradcheck("export", run, "--format", "perfetto").out.strip() == str(run / "export" / "perfetto.json")
    assert gradcheck("diagnose", run).code == 1


def test_an_export_that_cannot_be_written_says_so(gradcheck: Gradcheck, fixed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "below", tmp_path / "file"):
        outcome = gradcheck("export", fixed, "-o", output)
        assert outcome.code == 2
        assert outcome.err.startswith("error E711: cannot write")


def test_the_ci_example_calls_commands_and_flags_that_exist(gradcheck: Gradcheck) -> None:
    import yaml

    text = (Path(__file__).parents[2] / "examples" / "ci.yml").read_text()
    assert yaml.safe_load(text)["jobs"]
    calls = re.findall(r"^\s+(?:run: )?gradcheck (\w+)(.*)$", text, re.M)
    assert {command for command, _ in calls} == {"run", "diagnose", "report"}
    for command, rest in calls:
        help_text = gradcheck(command, "--help").out
        for flag in re.findall(r"--[\w-]+", rest.partition(" -- ")[0]):
            assert flag in help_text
    for form in re.findall(r"--format (\w+)", text):
        assert form in formats.MODULES

"""gradcheck scenario: options, exit codes, files. The runner is replaced; tests/scenarios runs the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line_doubles import Gradcheck
from sample_reports import report

from gradcheck_dist.diagnosis.finding import ScenarioReport, Tool, VariantReport
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.scenarios import runner
from gradcheck_dist.scenarios.jobs import Overrides
from gradcheck_dist.scenarios.runner import Result
from gradcheck_dist.trainer import launch


def result(*, right: bool = True, error: GradcheckError | None = None, run_dir: Path | None = None) -> Result:
    variant = VariantReport(
        variant="averaging", expected_finding=None, report=report(), as_expected=right, mismatch="" if right else "off"
    )
    document = ScenarioReport(tool=Tool(version="0"), scenario="ddp-accum", as_expected=right, variants=[variant])
    return Result(document, error, run_dir)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the runner was asked; `answer` is what it gives."""
    asked: dict[str, Any] = {"answer": result()}

    def run_scenario(scenario: object, overrides: Overrides, **options: Any) -> Result:
        asked.update(options, scenario=scenario, overrides=overrides)
        if isinstance(asked["answer"], BaseException):
            raise asked["answer"]
        return asked["answer"]

    monkeypatch.setattr(runner, "run_scenario", run_scenario)
    monkeypatch.setattr(launch, "warm_up", lambda: None)
    return asked


def test_options_reach_the_runner(gradcheck: Gradcheck, asked: dict[str, Any], tmp_path: Path) -> None:
    data = tmp_path / "mine.txt"
    data.write_text("\n\n".join(f"Text {index} of one's own." for index in range(99)))
    options = "--nproc 4 --accum 5 --seed 7 --steps 2 --dtype bfloat16"
    outcome = gradcheck("scenario", "ddp-accum", *options.split(), "--data", data, "--keep", tmp_path / "runs")
    assert outcome.code == 0
    assert asked["overrides"] == Overrides(4, 5, None, 7, 2, "bfloat16", str(data))
    assert asked["keep"] == tmp_path / "runs"
    assert asked["command"][:3] == ("gradcheck", "scenario", "ddp-accum")


def test_the_exit_code_tells_right_from_wrong_from_not_run(
    gradcheck: Gradcheck, asked: dict[str, Any], tmp_path: Path
) -> None:
    assert gradcheck("scenario", "ddp-accum").code == 0
    asked["answer"] = result(right=False, run_dir=tmp_path)
    wrong = gradcheck("scenario", "ddp-accum")
    assert wrong.code == 1
    assert f"the runs are in {tmp_path}" in wrong.err
    asked["answer"] = result(right=False, error=GradcheckError("rank 1 died", code="E232"))
    dead = gradcheck("scenario", "ddp-accum")
    assert dead.code == 2
    assert "error E232: rank 1 died" in dead.err
    assert "averaging: found GS101" in dead.out


@pytest.mark.parametrize(("right", "kept"), [(True, False), (False, True)])
def test_the_screens_open_over_the_runs_which_stay_where_something_was_wrong(
    gradcheck: Gradcheck, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, right: bool, kept: bool
) -> None:
    seen: list[Path] = []

    def open_screens(folder: Path) -> None:
        assert folder.is_dir()
        seen.append(folder)

    monkeypatch.setattr("gradcheck_dist.cli.live.check_terminal", lambda _: None)
    monkeypatch.setattr("gradcheck_dist.cli.live.open_screens", open_screens)
    asked["answer"] = result(right=right, run_dir=Path("/told"))
    outcome = gradcheck("scenario", "ddp-accum", "--tui")
    assert outcome.code == int(not right)
    assert seen == [asked["keep"]]
    assert seen[0].is_dir() == kept
    assert ("the runs are in" in outcome.err) == kept
    if kept:
        seen[0].rmdir()


def test_the_result_is_a_summary_below_a_report_a_variant(gradcheck: Gradcheck, asked: dict[str, Any]) -> None:
    lines = gradcheck("scenario", "ddp-accum").out.splitlines()
    assert lines[1].split()[0] == "verdict"
    assert "ddp-accum: 1 of 1 variant as the scenario says" in lines
    assert lines[-1].startswith("  averaging: found GS101 double-averaging, factor 1/dp_replicate (as expected)")


def test_a_report_file_is_json_or_by_its_name_markdown(
    gradcheck: Gradcheck, asked: dict[str, Any], tmp_path: Path
) -> None:
    gradcheck("scenario", "ddp-accum", "--report", tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["variants"][0]["report"]["findings"][0]["code"] == "GS101"
    gradcheck("scenario", "ddp-accum", "--report", tmp_path / "r.md")
    assert (tmp_path / "r.md").read_text().startswith("<!-- gradcheck -->")


def test_what_was_judged_before_a_rank_died_is_still_reported(
    gradcheck: Gradcheck, asked: dict[str, Any], tmp_path: Path
) -> None:
    asked["answer"] = result(right=False, error=GradcheckError("rank 1 died"))
    assert gradcheck("scenario", "ddp-accum", "--report", tmp_path / "r.json").code == 2
    assert (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ddp-acum"], ["unknown scenario 'ddp-acum'", "Did you mean: ddp-accum"]),
        ([], ["no scenario was named", "ddp-accum", "--list", "--all"]),
        ([__file__], ["is no scenario file: these end in .yaml"]),
        (["nowhere/x.yaml"], ["no scenario file nowhere/x.yaml", "--new NAME"]),
        (["--all", "--report", "r.html"], ["'.html'", "Legal values: .json, .md"]),
        (["ddp-accum", "--all"], ["--all runs ddp-accum too"]),
        (["ddp-accum", "--report", "r.pdf"], ["'.pdf'", ".sarif"]),
        (["--all", "--report", "/nowhere/r.json"], ["cannot write /nowhere/r.json"]),
        (["--all", "--library", "/nowhere"], ["the library /nowhere is no folder", "--new NAME"]),
        (["--list", "--library", "EMPTY"], ["EMPTY holds no scenario", "--new NAME --library"]),
        (["--all", "--library", "EMPTY"], ["EMPTY holds no scenario"]),
        (["--new", "../x"], ["the name '../x' is unusable"]),
        (["ddp-accum", "--keep", ""], ["its name is empty"]),
        (["ddp-accum", "--keep", "FILE/runs"], ["FILE is a file", "Name a folder"]),
        (["ddp-accum", "--nproc", "0"], ["--nproc is 0", "Legal values: 2"]),
        (["pp-accum", "--nproc", "5"], ["pp=5", "Legal values of pp here: 1 to 4"]),
        (["ddp-accum", "--microbatches", "2"], ["microbatches=2 without a pipeline"]),
        (["ddp-accum", "--accum", "1"], ["cannot show its bug"]),
        (["ddp-accum", "--data", "/nowhere/x.txt"], ["/nowhere/x.txt", "does not exist"]),
        (
            ["ddp-accum", "--data", "SMALL"],
            ["SMALL holds 2 documents, and one step of scenario ddp-accum sees", "--nproc"],
        ),
        (["ddp-accum", "--accum", "1000"], ["the package's own text holds", "choose a smaller --nproc, --accum"]),
        (["ddp-accum", "--report", "/nowhere/r.json"], ["cannot write /nowhere/r.json"]),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else None,
)
def test_bad_input_is_refused_before_anything_runs(
    gradcheck: Gradcheck,
    asked: dict[str, Any],
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").write_text("")
    (tmp_path / "SMALL").write_text("one\n\ntwo")
    outcome = gradcheck("scenario", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    for word in words:
        assert word in outcome.err
    assert "scenario" not in asked


def test_a_file_that_is_no_text_is_named(gradcheck: Gradcheck, tmp_path: Path) -> None:
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe")
    outcome = gradcheck("scenario", "bin", "--library", tmp_path)
    assert outcome.code == 2 and "E603: cannot read" in outcome.err and "bin.yaml" in outcome.err


def test_a_file_is_a_scenario_without_its_library(gradcheck: Gradcheck, asked: dict[str, Any], tmp_path: Path) -> None:
    assert gradcheck("scenario", "--new", "mine", "--library", tmp_path).code == 0
    assert gradcheck("scenario", tmp_path / "mine.yaml").code == 0
    assert asked["scenario"].name == "mine"
    missing = gradcheck("scenario", tmp_path / "main.yaml")
    assert missing.code == 2
    assert f"no scenario file {tmp_path}/main.yaml. Did you mean: {tmp_path}/mine.yaml?" in missing.err


def test_the_list_has_the_formats_of_results(gradcheck: Gradcheck) -> None:
    rows = json.loads(gradcheck("scenario", "--list", "--format", "json").out)
    (row,) = (one for one in rows if one["name"] == "ddp-accum")
    assert row["variants"] == ["averaging", "sum-every-backward", "fixed"]
    assert f"- `ddp-accum` {row['title']} (averaging, " in gradcheck("scenario", "--list", "--format", "md").out


def test_list_names_every_scenario_and_its_variants(gradcheck: Gradcheck) -> None:
    text = gradcheck("scenario", "--list").out
    assert "ddp-accum" in text
    assert "averaging, sum-every-backward, fixed" in text


def test_all_runs_every_scenario_and_goes_on_after_a_failure(
    gradcheck: Gradcheck, asked: dict[str, Any], tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    assert gradcheck("scenario", "--new", "first", "--library", mine).code == 0
    (mine / "second.yaml").write_text("name: other")
    assert gradcheck("scenario", "--new", "third", "--library", mine).code == 0
    outcome = gradcheck("scenario", "--all", "--library", mine, "--report", tmp_path / "r.json", "--seed", "7")
    assert outcome.code == 2
    assert asked["overrides"] == Overrides(seed=7)
    assert asked["scenario"].name == "third"
    lines = outcome.out.splitlines()
    assert lines[0].startswith(
        "ok                   -  ddp-accum averaging: GS101 double-averaging (1/dp_replicate; reduce"
    )
    assert lines[1].startswith("NOT                  -  second: could not run")
    assert "second.yaml: " in lines[2]
    assert lines[-1].startswith("2 of 3 variants of 2 scenarios as the files say")
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["as_expected"] for row in rows] == [True, False, True]
    (mine / "second.yaml").unlink()
    assert gradcheck("scenario", "--all", "--library", mine, "--format", "md").out.startswith("2 of 2 variants of 1")
    asked["answer"] = result(right=False)
    assert gradcheck("scenario", "--all", "--library", mine).code == 1
    asked["answer"] = ZeroDivisionError("in the engine")
    broken = gradcheck("scenario", "--all", "--library", mine)
    assert broken.code == 2
    assert "ZeroDivisionError: in the engine" in broken.out


def test_all_skips_what_cannot_have_what_the_command_line_sets(
    gradcheck: Gradcheck, asked: dict[str, Any], tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    for name in ("half", "whole"):
        gradcheck("scenario", "--new", name, "--library", mine)
    half = mine / "half.yaml"
    half.write_text(half.read_text().replace("\nconfig: {}", "\nconfig: {mixed_precision: float16}"))
    command = ("scenario", "--all", "--library", mine, "--dtype", "bfloat16")
    outcome = gradcheck(*command, "--report", tmp_path / "r.json")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0].startswith("-                    -  half: skipped")
    assert "E213: mixed_precision=float16 with dtype=bfloat16" in lines[1]
    assert lines[-1] == "1 of 1 variant of 1 scenario as the files say, in 0 s; 1 scenario skipped"
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["as_expected"] is True
    assert (document["rows"][0]["found"], document["rows"][0]["as_expected"]) == (None, None)
    assert "| skipped: E213" in gradcheck(*command, "--format", "md").out
    nothing = gradcheck(*command[:-2], "--accum", "0")
    assert nothing.code == 2
    assert nothing.out.splitlines()[-1].endswith("2 scenarios skipped")


def test_a_new_scenario_runs_as_it_stands_and_is_never_overwritten(
    gradcheck: Gradcheck, asked: dict[str, Any], tmp_path: Path
) -> None:
    outcome = gradcheck("scenario", "--new", "my-bug", "--library", tmp_path)
    assert outcome.out.strip() == f"gradcheck scenario my-bug --library {tmp_path}"
    assert gradcheck("scenario", "my-bug", "--library", tmp_path).code == 0
    assert asked["scenario"].variants[0].faults == ("ddp-averages",)
    assert "my-bug" in gradcheck("scenario", "--list", "--library", tmp_path).out
    again = gradcheck("scenario", "--new", "my-bug", "--library", tmp_path)
    assert again.code == 2
    assert "exists already" in again.err


def test_ctrl_c_is_exit_code_130_without_a_traceback(gradcheck: Gradcheck, asked: dict[str, Any]) -> None:
    asked["answer"] = KeyboardInterrupt()
    outcome = gradcheck("scenario", "ddp-accum")
    assert outcome.code == 130
    assert "Traceback" not in outcome.err

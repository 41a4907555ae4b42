"""gradcheck diagnose, report, explain."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from command_line_doubles import Engine, Gradcheck
from sample_reports import report

from gradcheck_dist.reports import json_report


def test_diagnose_tells_its_verdict_by_exit_code(gradcheck: Gradcheck, engine: Engine, run_dir: Path) -> None:
    codes = {}
    for verdict in ("clean", "findings", "undetermined"):
        engine.answer = report(verdict=verdict)
        codes[verdict] = gradcheck("diagnose", run_dir).code
    assert codes == {"clean": 0, "findings": 1, "undetermined": 2}


def test_diagnose_writes_the_report_to_stdout_and_nothing_else(
    gradcheck: Gradcheck, engine: Engine, run_dir: Path
) -> None:
    outcome = gradcheck("diagnose", run_dir, "--format", "json")
    assert json_report.decode(outcome.out.encode()) == engine.answer
    assert outcome.err == ""


def test_diagnose_hands_on_objective_and_steps(gradcheck: Gradcheck, engine: Engine, run_dir: Path) -> None:
    gradcheck("diagnose", run_dir, "--objective", "sum", "--steps", "2:5")
    assert engine.asked["objective"] == "sum"
    assert list(engine.asked["steps"]) == [2, 3, 4]


@pytest.mark.parametrize(("text", "first", "last"), [("3", 3, 3), ("3:", 3, None), (":2", 0, 1)])
def test_either_end_of_the_steps_may_be_left_out(
    gradcheck: Gradcheck, engine: Engine, run_dir: Path, text: str, first: int, last: int | None
) -> None:
    gradcheck("diagnose", run_dir, "--steps", text)
    steps = engine.asked["steps"]
    assert steps[0] == first
    assert last is None or steps[-1] == last


@pytest.mark.parametrize("text", ["a:b", "5:2", "-1:2", "1:2:3", "", "2:2"])
def test_other_steps_are_refused_with_the_legal_forms(
    gradcheck: Gradcheck, engine: Engine, run_dir: Path, text: str
) -> None:
    outcome = gradcheck("diagnose", run_dir, f"--steps={text}")
    assert outcome.code == 2
    assert f"--steps is {text!r}; legal values are A:B" in outcome.err


@pytest.mark.parametrize("command", ["diagnose", "report"])
def test_a_folder_that_holds_no_run_is_exit_code_2_with_a_message_on_stderr(
    gradcheck: Gradcheck, engine: Engine, tmp_path: Path, command: str
) -> None:
    for folder, code in ((tmp_path / "missing", "E504"), (tmp_path, "E505")):
        outcome = gradcheck(command, folder)
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err.startswith(f"error {code}: ")
        assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("report.json", "`gradcheck report "),
        ("rank-00000.trace", "It belongs to the run folder"),
        ("train.py", "Name a "),
    ],
)
def test_a_file_in_the_place_of_a_run_folder_is_told_as_one(
    gradcheck: Gradcheck, tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / name).write_text("")
    outcome = gradcheck("diagnose", tmp_path / name)
    assert outcome.err.startswith(f"error E504: {tmp_path / name} is a file and no run folder. ")
    assert said in outcome.err


def test_a_run_of_another_schema_version_is_refused(gradcheck: Gradcheck, engine: Engine, run_dir: Path) -> None:
    (run_dir / "manifest.json").write_text('{"schema_version": 99}')
    outcome = gradcheck("diagnose", run_dir)
    assert outcome.code == 2
    assert "schema version 99" in outcome.err


def test_report_writes_a_comment_and_exits_0_whatever_the_verdict(
    gradcheck: Gradcheck, engine: Engine, run_dir: Path, tmp_path: Path
) -> None:
    assert gradcheck("report", run_dir).out.startswith("<!-- gradcheck -->")
    outcome = gradcheck("report", run_dir, "--format", "json", "--output", tmp_path / "report.json")
    assert (outcome.code, outcome.out) == (0, "")
    assert json_report.decode((tmp_path / "report.json").read_bytes()) == engine.answer


def test_report_turns_a_json_report_into_a_comment_without_its_run(
    gradcheck: Gradcheck, engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_bytes(json_report.encode(report()))
    outcome = gradcheck("report", tmp_path / "report.json", "--format", "md")
    assert "GS101 double-averaging" in outcome.out
    assert engine.asked == {}


def test_a_report_that_cannot_be_written_says_so_before_the_work(
    gradcheck: Gradcheck, engine: Engine, run_dir: Path, tmp_path: Path
) -> None:
    for output in (tmp_path, tmp_path / "nowhere" / "report.md"):
        outcome = gradcheck("report", run_dir, "--output", output)
        assert outcome.code == 2
        assert f"cannot write {output}" in outcome.err
    assert engine.asked == {}


def test_a_report_file_is_replaced_whole(gradcheck: Gradcheck, engine: Engine, run_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.md"
    output.write_text("old")
    gradcheck("report", run_dir, "--output", output)
    assert output.read_text().startswith("<!-- gradcheck -->")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_report_goes_through_a_link_and_into_a_device_and_replaces_neither(
    gradcheck: Gradcheck, engine: Engine, run_dir: Path, tmp_path: Path
) -> None:
    """As root, /dev/null became a file."""
    link, pipe = tmp_path / "link.md", tmp_path / "pipe.md"
    link.symlink_to(tmp_path / "report.md")
    assert gradcheck("report", run_dir, "--output", link).code == 0
    assert link.is_symlink() and (tmp_path / "report.md").read_text().startswith("<!-- gradcheck -->")
    os.mkfifo(pipe)
    read = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert gradcheck("report", run_dir, "--output", pipe).code == 0
        assert os.read(read, 100).startswith(b"<!-- gradcheck -->")
    finally:
        os.close(read)
    assert pipe.is_fifo()


@pytest.mark.parametrize("command", ["diagnose", "report", "export", "watch"])
def test_an_empty_name_is_not_the_working_directory(gradcheck: Gradcheck, command: str) -> None:
    outcome = gradcheck(command, "")
    assert (outcome.code, outcome.out) == (2, "")
    assert "name" in outcome.err and "is empty" in outcome.err


def test_a_run_is_not_recorded_into_the_working_directory_for_an_empty_name(gradcheck: Gradcheck) -> None:
    outcome = gradcheck("run", "--out", "", "--", sys.executable, "-c", "pass")
    assert outcome.code == 2 and "its name is empty" in outcome.err


def test_a_tensorboard_folder_that_is_a_file_is_refused_before_the_work(gradcheck: Gradcheck, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    ran = tmp_path / "ran"
    for folder in (file, file / "logs"):
        outcome = gradcheck("run", "--tensorboard", folder, "--", sys.executable, "-c", f"open({str(ran)!r}, 'w')")
        assert outcome.code == 2 and f"{file} is a file" in outcome.err
    assert not ran.exists()


def test_explain_shows_the_page_of_a_rule_by_code_and_by_name(gradcheck: Gradcheck) -> None:
    by_code = gradcheck("explain", "gs101")
    assert by_code.code == 0
    assert by_code.out.startswith("# GS101 double-averaging")
    assert gradcheck("explain", "double-averaging").out == by_code.out


def test_explain_all_shows_every_rule_with_all_its_headings(gradcheck: Gradcheck) -> None:
    text = gradcheck("explain", "--all").out
    pages = re.split(r"^# (?=GS\d{3} )", text, flags=re.M)[1:]
    assert {"GS101", "GS102", "GS201", "GS301", "GS302"} <= {page[:5] for page in pages}
    for page in pages:
        headings = re.findall(r"^## (.+)$", page, re.M)
        assert headings == ["What it does", "Why it matters", "Example", "Fix", "References"], page[:40]


def test_a_page_is_folded_anew_on_a_narrow_terminal_and_its_code_is_not(
    gradcheck: Gradcheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = gradcheck("explain", "GS104").out
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    shown = gradcheck("explain", "GS104").out
    assert shown.split() == piped.split()
    assert all(len(line) <= 60 or line.startswith("    ") for line in shown.splitlines())
    assert [line for line in shown.splitlines() if line.startswith(("    ", "#"))] == [
        line for line in piped.splitlines() if line.startswith(("    ", "#"))
    ]


def test_the_code_of_an_error_is_no_rule_and_is_told_so(gradcheck: Gradcheck) -> None:
    outcome = gradcheck("explain", "E711")
    assert outcome.code == 2
    assert "E711 is the code of an error" in outcome.err and "Did you mean" not in outcome.err


def test_explain_knows_the_nearest_rule(gradcheck: Gradcheck) -> None:
    outcome = gradcheck("explain", "double-avraging")
    assert outcome.code == 2
    assert "Did you mean: double-averaging" in outcome.err


def test_json_from_the_command_line_is_ascii_safe_for_any_terminal(
    gradcheck: Gradcheck, engine: Engine, run_dir: Path
) -> None:
    engine.answer.run.id = "Łódź\x1b[31m"
    outcome = gradcheck("diagnose", run_dir, "--format", "json")
    assert "\x1b" not in outcome.out
    assert json.loads(outcome.out)["run"]["id"] == "Łódź\x1b[31m"


def test_a_rule_or_scenario_is_found_by_a_part_of_its_name(gradcheck: Gradcheck) -> None:
    assert "Did you mean: double-averaging?" in gradcheck("explain", "double").err
    assert "Did you mean: ddp-accum, " in gradcheck("scenario", "ddp").err


def test_the_names_of_all_rules_end_in_one_column(gradcheck: Gradcheck) -> None:
    lines = gradcheck("explain").out.splitlines()
    begins = {len(line) - len(line.split(None, 2)[2]) for line in lines if line.startswith("GS")}
    assert len(begins) == 1


def test_a_folder_of_damaged_files_says_once_what_to_do(gradcheck: Gradcheck, tmp_path: Path) -> None:
    (tmp_path / "rank-00000.trace").write_text("hello")
    outcome = gradcheck("diagnose", tmp_path)
    assert outcome.code == 2 and outcome.err.startswith("error E505: ")
    assert outcome.err.count("Name a ") == 1

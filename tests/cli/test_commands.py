"""The command line as a whole: help, unknown commands, doctor, progress, pipes."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line_doubles import Gradcheck

from gradcheck_dist.cli import doctor, progress
from gradcheck_dist.cli.main import COMMANDS

# Flags that people script against: more may be added, none taken away.
FLAGS = {
    "run": "--out --steps --every --every-step --sample-size --objective --axes --same-data --live --exact --verify "
    "--meant --strict --report --tensorboard --format",
    "study": "--out --steps --only --report --format",
    "matrix": "--quick --only --list --resume --report --format",
    "scenario": "--list --all --new --library --nproc --accum --microbatches --seed --dtype --steps --data --report "
    "--keep --tui --format",
    "diagnose": "--format --objective --steps --first --jobs --dask --export-golden --golden",
    "watch": "--compare --screen --web --port",
    "report": "--format --output --before --after --plotlyjs --objective --steps",
    "compare": "--axes --by --loss --grad-norm --tokens --format --output",
    "export": "--format --output --objective --steps",
    "predict": "--ddp --fsdp --hsdp --pp --accum --loss --loss-scale --reduction --scale-grads --what-if --format",
    "explain": "--all",
    "doctor": "--format",
    "bench": "--rounds --format",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_keeps_its_flags(gradcheck: Gradcheck, command: str) -> None:
    outcome = gradcheck(command, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"Usage: gradcheck {command}")
    for flag in FLAGS[command].split():
        assert flag in outcome.out


def test_help_lists_every_command(gradcheck: Gradcheck) -> None:
    text = gradcheck("--help").out
    for command in COMMANDS:
        assert f"\n  {command}" in text


def test_the_overview_fits_a_terminal_of_80_columns(gradcheck: Gradcheck) -> None:
    assert max(map(len, gradcheck("--help").out.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_the_overview_says_what_the_command_says_of_itself(command: str) -> None:
    function = getattr(importlib.import_module(f"gradcheck_dist.cli.{command}"), command)
    first = (inspect.getdoc(function) or "").split("\n\n")[0]
    assert COMMANDS[command] == " ".join(first.split())


def test_the_overview_loads_no_command_and_no_typer() -> None:
    script = (
        "import sys; from gradcheck_dist.cli.main import run; run(['--help']); "
        "sys.exit(any(name == 'typer' or name.startswith('gradcheck_dist.cli.') for name in "
        "sys.modules.keys() - {'gradcheck_dist.cli.main'}))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, timeout=30)


def test_an_unknown_command_is_exit_code_2_and_gets_the_nearest(gradcheck: Gradcheck) -> None:
    outcome = gradcheck("diagnos", "x")
    assert outcome.code == 2
    assert "diagnose" in outcome.err


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradcheck_dist", "--version"], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.startswith("gradcheck ")


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    script = f"{sys.executable} -m gradcheck_dist scenario --list | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is always full")
def test_a_disk_that_is_full_is_told_without_a_traceback() -> None:
    script = f"{sys.executable} -m gradcheck_dist scenario --list > /dev/full"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error E711: cannot write the result: No space left on device.")


def test_a_folder_that_was_removed_is_told_without_a_traceback(tmp_path: Path) -> None:
    script = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m gradcheck_dist run -- true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error E711: the folder that you are in was removed.")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_doctor_names_what_works_and_what_is_needed(gradcheck: Gradcheck) -> None:
    outcome = gradcheck("doctor", "--format", "json")
    checks = {check["what"]: check for check in json.loads(outcome.out)["checks"]}
    assert {"python", "ports", "disk", "torch", "gloo", "CUDA", "nccl", "probe ddp", "probe loss"} <= checks.keys()
    assert checks["gloo"]["works"], checks["gloo"]["detail"]
    assert outcome.code == 0


def test_doctor_names_only_probes_that_cannot_hook() -> None:
    probes = [doctor.Check(f"probe {name}", name != "fsdp", "why", needed=False) for name in ("ddp", "fsdp", "loss")]
    shown = doctor._shown([doctor.Check("gloo", True, "well"), *probes])
    assert [check.what for check in shown] == ["gloo", "probe fsdp", "probes"]
    assert shown[-1].detail == "2 of 3 can hook into this torch"


def test_doctor_outlives_a_torch_that_hangs_and_tells_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch, gradcheck: Gradcheck, tmp_path: Path
) -> None:
    slow = tmp_path / "hanging_python"
    line = json.dumps({"what": "torch", "works": True, "detail": "2.13", "needed": True})
    slow.write_text(f"#!/bin/sh\necho '{line}'\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(doctor, "TORCH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(sys, "executable", str(slow))
    started = time.perf_counter()
    outcome = gradcheck("doctor")
    assert time.perf_counter() - started < 20
    assert outcome.code == 1
    assert "no answer within 0.5 s after torch" in outcome.out


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Screen(), True), (io.StringIO(), False)], ids=["terminal", "pipe"])
def test_progress_shows_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with progress.Progress("training [2 ranks]") as display:
        time.sleep(0.5)
        display.update("judging")
    assert ("training [2 ranks]" in stream.getvalue()) is shown


def test_a_list_is_folded_beside_its_names_on_a_narrow_terminal_and_one_line_each_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, gradcheck: Gradcheck
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    piped = gradcheck("explain").out.splitlines()
    assert all(line.startswith("GS") for line in piped) and max(map(len, piped)) > 60
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    gradcheck("explain")
    shown = screen.getvalue().splitlines()
    assert max(map(len, shown)) <= 60
    assert {line[:29].strip()[:2] for line in shown} == {"GS", ""}
    assert [word for line in shown for word in line.split()] == [word for line in piped for word in line.split()]


@pytest.mark.parametrize("command", ["doctor", "bench", "predict"])
def test_what_is_no_report_has_no_format_for_one(gradcheck: Gradcheck, command: str) -> None:
    outcome = gradcheck(command, "--format", "md")
    assert (outcome.code, outcome.out) == (2, "")
    assert "unknown --format 'md'. Legal values: json, text." in outcome.err


def test_a_short_task_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Screen()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress("reading"):
        pass
    assert stream.getvalue() == ""

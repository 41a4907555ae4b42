"""The real thing from the command line: a scenario is recorded once, then judged, damaged, killed and interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trace.run import Run, read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
COMMAND = [sys.executable, "-m", "gradcheck_dist"]
PATIENCE_S = 60.0


def gradcheck(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR of `gradcheck scenario ddp-accum --keep DIR`, with DIR/report.json beside the variants."""
    folder = tmp_path_factory.mktemp("recorded")
    done = gradcheck("scenario", "ddp-accum", "--keep", folder, "--report", folder / "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    return folder


def test_the_report_of_a_scenario_holds_four_two_one(recorded: Path) -> None:
    variants = {entry["variant"]: entry for entry in json.loads((recorded / "report.json").read_text())["variants"]}
    weights = variants["sum-every-backward"]["report"]["weights"]
    ratios = {weight["contribution"]["accumulation_step"]: weight["ratio"] for weight in weights}
    assert ratios == pytest.approx({0: 4.0, 1: 2.0, 2: 1.0}, rel=1e-4)
    assert variants["averaging"]["expected_finding"]["code"] == "GS101"
    assert variants["averaging"]["report"]["run"]["command"][0] == "gradcheck"


@pytest.mark.parametrize(("variant", "code"), [("averaging", 1), ("sum-every-backward", 1), ("fixed", 0)])
def test_a_kept_run_is_judged_again_alike(recorded: Path, variant: str, code: int) -> None:
    done = gradcheck("diagnose", recorded / variant)
    assert done.returncode == code, done.stderr
    assert done.stderr == ""


def test_the_folder_above_the_variants_names_them(recorded: Path) -> None:
    done = gradcheck("diagnose", recorded)
    assert done.returncode == 2
    assert "averaging, fixed, sum-every-backward" in done.stderr


def test_a_second_recording_into_the_same_folder_is_refused_at_once(recorded: Path) -> None:
    before = (recorded / "averaging" / "rank-00000.trace").read_bytes()
    done = gradcheck("scenario", "ddp-accum", "--keep", recorded)
    assert done.returncode == 2
    assert "nothing recorded is ever overwritten" in done.stderr
    assert (recorded / "averaging" / "rank-00000.trace").read_bytes() == before


@pytest.mark.parametrize(("command", "code"), [("diagnose", 1), ("report", 0)])
def test_a_run_is_judged_on_a_machine_without_torch(recorded: Path, command: str, code: int) -> None:
    script = "import sys; sys.modules['torch'] = None; from gradcheck_dist.cli.main import main; main()"
    arguments = [sys.executable, "-c", script, command, str(recorded / "averaging")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "double-averaging" in done.stdout


def test_a_missing_rank_is_said_and_how_to_bring_it(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded / "averaging", tmp_path / "run")
    (tmp_path / "run" / "rank-00001.trace").unlink()
    done = gradcheck("diagnose", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert "the trace of rank 1 is missing" in " ".join(done.stdout.split())
    assert "rank-*.trace" in done.stdout


def test_data_that_is_no_text_is_refused_and_nothing_is_left_running(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "noise.txt").write_bytes(bytes(range(128, 256)) * 50)
    for data in ("empty.txt", "noise.txt", "missing.txt"):
        done = gradcheck("scenario", "ddp-accum", "--data", tmp_path / data, "--keep", tmp_path / f"runs-{data}")
        assert done.returncode == 2, done.stdout
        assert data in done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture
def training(tmp_path: Path) -> subprocess.Popen[str]:
    """A scenario in the middle of a long first variant, recording into tmp_path/runs."""
    command = [*COMMAND, "scenario", "ddp-accum", "--steps", "100000", "--keep", str(tmp_path / "runs")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(lambda: all(num_steps(recording(tmp_path), rank) > 3 for rank in (0, 1)))
    return process


def recording(tmp_path: Path) -> Run | None:
    try:
        return read_run(tmp_path / "runs" / "averaging")
    except GradcheckError:
        return None


def num_steps(run: Run | None, rank: int) -> int:
    return max((event.step for event in run.ranks[rank].events), default=0) if run and rank in run.ranks else 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_dies_stops_the_others_within_seconds_and_its_trace_stays(
    training: subprocess.Popen[str], tmp_path: Path
) -> None:
    run = recording(tmp_path)
    assert run
    pids = [run.ranks[rank].header.pid for rank in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    _, errors = training.communicate(timeout=60)
    assert training.returncode == 2, errors
    assert time.monotonic() - started < 20
    assert "rank 1 of 2 was killed by SIGKILL" in errors
    assert f"kept in {tmp_path / 'runs' / 'averaging'}" in errors
    assert num_steps(recording(tmp_path), 1) > 3
    wait_for(lambda: not any(map(is_alive, pids)))


def test_ctrl_c_leaves_no_rank_behind_and_exits_130(training: subprocess.Popen[str], tmp_path: Path) -> None:
    run = recording(tmp_path)
    assert run
    pids = [run.ranks[rank].header.pid for rank in (0, 1)]
    os.killpg(training.pid, signal.SIGINT)
    _, errors = training.communicate(timeout=60)
    assert training.returncode == 130, errors
    assert "Traceback" not in errors
    wait_for(lambda: not any(map(is_alive, pids)))
    assert recording(tmp_path)

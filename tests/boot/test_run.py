"""`gradcheck run -- CMD`: the command is as it was, and the verdict follows."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradcheck_dist.cli import child
from gradcheck_dist.cli.run import run as run_command
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import StepEnd
from gradcheck_dist.trace.frames import MAGIC
from gradcheck_dist.trace.run import create_run_dir, read_run
from gradcheck_dist.trace.writer import trace_path

from .conftest import TRAINER, Outcome, Run, start


def steps_of(folder: Path) -> set[int]:
    events = [event for trace in read_run(folder).ranks.values() for event in trace.events]
    return {event.step for event in events if isinstance(event, StepEnd)}


ORDINARY = """
import torch.nn.functional as F
watched = F.cross_entropy
train(8)
if F.cross_entropy is not watched:
    print("probes gone", model.weight._backward_hooks in (None, {}))
print("said", sys.argv[1:], os.environ["MINE"])
print("loader", torch.__spec__.loader.__class__.__name__, torch.__loader__ is torch.__spec__.loader)
print("parameters", [parameter.flatten().tolist() for parameter in model.parameters()])
sys.exit(3)
"""


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A healthy training of 8 steps, with default options, that ends with 3."""
    return start(tmp_path_factory.mktemp("ordinary"), ORDINARY, "--a", "b", env={"MINE": "1"})


def test_output_arguments_and_exit_code_pass_through(ordinary: Outcome) -> None:
    assert ordinary.code == 3
    assert "said ['--a', 'b'] 1" in ordinary.stdout.splitlines()
    first, *rest = ordinary.stderr.splitlines()
    assert first == f"gradcheck: recording into {ordinary.folder}"
    assert any("verdict  CLEAN" in line for line in rest)


def test_parameters_and_output_are_those_of_the_script_alone(ordinary: Outcome) -> None:
    script = [sys.executable, ordinary.folder.with_name("train.py"), "--a", "b"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINE": "1"}
    alone = subprocess.run(script, capture_output=True, text=True, timeout=60, env=environment)
    assert "parameters [[" in alone.stdout
    assert ordinary.stdout.replace("probes gone True\n", "") == alone.stdout


def test_the_run_folder_is_private(ordinary: Outcome) -> None:
    assert stat.S_IMODE(ordinary.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((ordinary.folder / "rank-00000.trace").stat().st_mode) == 0o600


def test_behind_the_last_step_the_probes_are_gone(ordinary: Outcome) -> None:
    assert "probes gone True" in ordinary.stdout.splitlines()


def test_torch_keeps_its_own_loader(ordinary: Outcome) -> None:
    assert "loader SourceFileLoader True" in ordinary.stdout.splitlines()


def test_three_steps_are_recorded_by_default(ordinary: Outcome) -> None:
    assert steps_of(ordinary.folder) == {0, 1, 2}


def test_what_is_inferred_says_from_what_and_how_to_declare_it(ordinary: Outcome) -> None:
    assert "inferred: no reduction or pipeline was seen" in ordinary.stderr and "--axes" in ordinary.stderr
    assert "--objective sets it" in ordinary.stderr


def test_what_is_declared_is_taken_other_steps_are_recorded_and_booting_twice_attaches_once(run: Run) -> None:
    code = """
from gradcheck_dist.boot import start
start.boot(); start._booted = False; start.boot()
train(12)
"""
    declared = run(code, options=("--axes", "tp=1", "--objective", "microbatch-mean", "--steps", "1:3", "--every", "4"))
    assert "not recording" not in declared.stderr
    assert "CLEAN" in declared.stderr
    assert steps_of(declared.folder) == {1, 2, 4, 8}
    assert "--axes" not in declared.stderr and "--objective" not in declared.stderr
    assert read_run(declared.folder).ranks[0].header.axes == dict.fromkeys(
        ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1
    )


@pytest.mark.parametrize(("divide", "code"), [("True", 0), ("False", 1)])
def test_strict_turns_findings_into_exit_1(run: Run, divide: str, code: int) -> None:
    done = run(f"train(divide={divide})", options=("--strict", "--format", "json"))
    assert done.code == code
    report = json.loads(done.stdout)
    assert [finding["code"] for finding in report["findings"]] == ([] if code == 0 else ["GS303"])
    if code:
        assert report["findings"][0]["factor"]["expression"] == "accumulation_steps"
        assert Path(report["findings"][0]["first_event"]["file"]).name == "train.py"


def test_what_to_type_next_is_as_short_as_the_folder_that_was_given(run: Run) -> None:
    done = run("train()", options=("--report", "run.md", "--report", "run.json"))
    assert "gradcheck diagnose run; as screens: gradcheck watch run" in done.stderr.splitlines()[-1]
    assert "wrote run.md" in done.stderr and "wrote run.json" in done.stderr, "--report may be given several times"


def test_strict_says_2_when_nothing_could_be_judged(run: Run) -> None:
    done = run("print('no training')", options=("--strict",))
    assert (done.code, done.stdout) == (2, "no training\n")
    assert "nothing was recorded" in done.stderr
    assert "--steps" not in done.stderr


def test_a_training_that_ends_before_the_steps_asked_for_is_a_reason_that_is_told(run: Run) -> None:
    done = run("train()", options=("--steps", "100:"))
    assert "Training may have ended before step 100 (--steps; the first is 0)." in done.stderr
    assert done.traces == []


def test_a_run_folder_that_cannot_be_written_any_more_is_the_reason(run: Run) -> None:
    done = run("import shutil\nfrom gradcheck_dist.boot.protocol import VARIABLE, decode\n"
               "shutil.rmtree(decode(os.environ[VARIABLE]).run_dir)")  # fmt: skip
    assert done.code == 0
    assert "cannot be written (No such file or directory)" in done.stderr


def test_the_commands_own_failure_comes_before_ours(run: Run) -> None:
    assert run("train(divide=False); sys.exit(5)", options=("--strict",)).code == 5


def test_isolated_interpreters_are_recorded_too(run: Run) -> None:
    assert run("train()", command=(sys.executable, "-I")).traces == ["rank-00000.trace"]  # -I is -E and more


def test_a_process_that_trains_nothing_leaves_no_file(run: Run) -> None:
    code = """
import subprocess, sys
evaluation = "import torch; torch.nn.functional.cross_entropy(torch.zeros(1, 2), torch.zeros(1).long())"
subprocess.run([sys.executable, "-c", evaluation])
subprocess.run([sys.executable, "-m", "pip", "--version"], stdout=subprocess.DEVNULL)
"""
    assert run(code, prelude="").traces == []


def test_nothing_heavy_is_loaded_before_the_first_line_of_the_script(run: Run) -> None:
    code = "import sys\nprint('early', [name for name in ('torch', 'numpy', 'msgspec') if name in sys.modules])"
    assert run(code, prelude="").stdout == "early []\n"


def test_a_variable_that_nobody_understands_is_told_and_harmless(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(1)"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "GRADCHECK_BOOT": "nonsense"},
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith("gradcheck: not recording: ")


def test_ranks_that_the_environment_cannot_mean_are_told_and_harmless(run: Run) -> None:
    done = run("train()\nprint('trained')\n", env={"RANK": "5", "WORLD_SIZE": "two"})
    assert (done.code, done.stdout, done.traces) == (0, "trained\n", [])
    assert "gradcheck: not recording: RANK is '5' and WORLD_SIZE is 'two' in the environment" in done.stderr
    assert "or said above why it did not record" in done.stderr


def test_without_the_variable_nothing_of_ours_is_loaded() -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('gradcheck')])"
    environment = {name: value for name, value in os.environ.items() if name != "GRADCHECK_BOOT"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "[]\n"


def test_a_command_that_cannot_start_is_named(tmp_path: Path) -> None:
    own = [sys.executable, "-m", "gradcheck_dist", "run", "--out", str(tmp_path / "run"), "--", "no-such-command"]
    done = subprocess.run(own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 127
    assert "error E714: cannot start 'no-such-command'" in done.stderr
    assert "The PATH holds no such program: activate the environment that has it" in done.stderr
    assert not (tmp_path / "run").exists()


def test_only_what_was_made_for_a_command_that_cannot_start_is_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for out in ("mine", "mine/deep/run"):
        with pytest.raises(GradcheckError, match="cannot start"):
            run_command(["/no/such"], out=tmp_path / out)
        assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_script_without_an_interpreter_gets_one_in_the_message(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(GradcheckError, match=r"It is a script: `gradcheck run -- python \S*train.py --lr \.\.\.`"):
        child.run([str(tmp_path / "train.py"), "--lr", "1"], {})


def test_a_folder_that_holds_a_run_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    create_run_dir(tmp_path / "run", {"world_size": 1})
    trace_path(tmp_path / "run", 0).write_bytes(MAGIC)
    done = run("train(); print('ran')")
    assert (done.code, done.stdout) == (2, "")
    assert "error E511" in done.stderr


def test_sigterm_reaches_the_command(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    own = [sys.executable, "-m", "gradcheck_dist", "run", "--out", str(tmp_path / "run"), "--"]
    with subprocess.Popen(
        [*own, sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 9


@pytest.mark.parametrize("options", [("--steps", "3:1"), ("--objective", "nonsense"), ("--every", "0")])
def test_a_wrong_option_is_told_before_the_command_starts(run: Run, options: tuple[str, ...]) -> None:
    started = time.monotonic()
    done = run("print('ran')", options=options)
    assert (done.code, done.stdout) == (2, "")
    assert time.monotonic() - started < 20


def test_the_trainer_of_these_tests_is_no_client_of_ours() -> None:
    assert "gradcheck" not in TRAINER


@pytest.mark.parametrize("axes", ["dp=2", "tp=0", "tp", "tp=2,tp=2"])
def test_axes_that_are_none_are_told(run: Run, axes: str) -> None:
    done = run("print('ran')", options=("--axes", axes))
    assert (done.code, done.stdout) == (2, "")
    assert "error E10" in done.stderr

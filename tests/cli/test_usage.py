"""Command lines that cannot be read, and Ctrl-C: what is told, and what to do."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line_doubles import Engine, Gradcheck

from gradcheck_dist.cli import interrupted
from gradcheck_dist.scenarios import matrix as table


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("diagnos x", "E721", "unknown command 'diagnos'. Did you mean: diagnose? Legal values: bench, compare,"),
        ("tui run", "E721", "'tui' is no command of gradcheck. Did you mean `gradcheck watch RUN`?"),
        ("help run", "E721", "Did you mean `gradcheck --help`?"),
        ("--strict run", "E721", "Options follow the command"),
        ("scenario --nprocs 2", "E722", "option '--nprocs' of gradcheck scenario. Did you mean: --nproc?"),
        ("scenario ddp-accum --strict", "E722", "'--strict' of gradcheck scenario. `gradcheck scenario --help` lists"),
        ("run --nproc-per-node 2 train.py", "E722", "An option of your own command belongs behind `--`."),
        ("export run -q", "E722", "'-q'"),
        ("diagnose", "E723", "needs RUN: run folder, or its URL in a store, as s3://bucket/run. For example: `gradch"),
        ("run", "E723", "`gradcheck run -- torchrun --nproc-per-node 2 train.py`"),
        ("run --out", "E723", "--out of gradcheck run needs DIR: run folder."),
        ("compare one", "E723", "needs TEST..."),
        ("run --strict=1 -- python", "E724", "--strict of gradcheck run takes no value."),
        ("diagnose a b", "E724", "'b' is too many: gradcheck diagnose takes RUN. A name with spaces needs quotes."),
        ("doctor x", "E724", "takes options only"),
        ("scenario ddp-accum --nproc two", "E725", "--nproc is 'two'; legal values are integers."),
        ("watch --port 99999999 run", "E725", "legal values are integers from 1 to 65535."),
        ("run --sample-size 7 -- true", "E725", "--sample-size is '7'; legal values are integers from 8 up."),
        ("bench --rounds 0", "E725", "--rounds is '0'; legal values are integers from 2 up."),
        ("predict --divide-factor x", "E725", "legal values are numbers."),
        ("report --format htm run", "E725", "unknown --format 'htm'. Did you mean: html? Legal values: github, html,"),
        ("report --format pdf run", "E725", "unknown --format 'pdf'. Legal values: github, html,"),
        ("frobnicate", "E721", "unknown command 'frobnicate'. Legal values: bench,"),
        ("run --meant Fn -- true", "E726", "--meant Fn exempts what --verify checks, and --verify is missing."),
        ("run --exact --every 5 -- true", "E726", "first recorded step, and --every records later ones."),
        ("run --exact --every-step -- true", "E726", "first recorded step, and --every-step records later ones."),
    ],
)
def test_a_wrong_command_line_is_told_with_the_legal_ones_and_the_next_step(
    gradcheck: Gradcheck, line: str, code: str, said: str
) -> None:
    outcome = gradcheck(*line.split())
    assert outcome.code == 2
    assert outcome.err.startswith(f"error {code}: ")
    assert said in outcome.err
    assert outcome.err.count("\n") == 1
    assert any(words in outcome.err for words in ("gradcheck", "Legal values", "Give one of them", "leave --meant out"))


def test_a_run_or_a_program_in_the_place_of_a_command_gets_the_command_it_needs(
    gradcheck: Gradcheck, tmp_path: Path
) -> None:
    assert f"To judge a run: `gradcheck diagnose {tmp_path}`." in gradcheck(tmp_path).err
    (tmp_path / "my run").mkdir()
    assert f"`gradcheck diagnose '{tmp_path / 'my run'}'`." in gradcheck(tmp_path / "my run").err
    assert "To record a program: `gradcheck run -- sh ...`." in gradcheck("sh", "train.sh").err


def test_who_stops_reading_is_no_finding() -> None:
    whole = subprocess.Popen(
        [sys.executable, "-m", "gradcheck_dist", "scenario", "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert whole.stdout is not None and whole.stderr is not None
    whole.stdout.close()
    assert whole.stderr.read() == b""
    assert whole.wait(60) == 141


def test_ctrl_c_says_that_nothing_came_of_it(
    gradcheck: Gradcheck, engine: Engine, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "diagnose", interrupt)
    outcome = gradcheck("diagnose", run_dir)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted before it was done\n")


def test_ctrl_c_in_a_matrix_says_what_is_kept_and_how_to_go_on(
    gradcheck: Gradcheck, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interrupted:
        ended = 0

        def run(self, case: table.Case) -> table.Row:
            if self.ended:
                raise KeyboardInterrupt
            self.ended = 1
            return table.Row(case.name, {"axes": {}}, "clean", 1.0, 1.0, 1.0, None, "")

    monkeypatch.setattr(table, "Matrix", Interrupted)
    monkeypatch.setattr("gradcheck_dist.trainer.launch.warm_up", lambda: None)
    kept = tmp_path / "kept.json"
    outcome = gradcheck("matrix", "--quick", "--resume", kept)
    assert outcome.code == 130
    assert outcome.err.endswith(f"had ended. They are kept in {kept}: the same command goes on.\n")
    assert outcome.err.startswith("interrupted: 1 of ")
    assert "--resume FILE keeps them." in gradcheck("matrix", "--quick").err


def test_what_an_interrupted_scenario_leaves_is_named(run_dir: Path, tmp_path: Path) -> None:
    assert interrupted.runs_left(None).startswith("nothing was kept. --keep DIR")
    assert interrupted.runs_left(tmp_path / "none") == "nothing was recorded yet."
    assert f"gradcheck diagnose {run_dir}" in interrupted.runs_left(run_dir.parent)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_the_fork_server_does_not_hear_ctrl_c_while_it_imports() -> None:
    """It runs below the same terminal, and would print where in its imports it was."""
    script = (
        "from multiprocessing import forkserver; from pathlib import Path; import os, signal\n"
        "from gradcheck_dist.trainer.launch import warm_up\n"
        "warm_up(); pid = forkserver._forkserver._forkserver_pid\n"
        "print(Path(f'/proc/{pid}/status').read_text()); os.kill(pid, signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    blocked = next(line for line in done.stdout.splitlines() if line.startswith("SigBlk:"))
    assert int(blocked.split()[1], 16) & 1 << (signal.SIGINT - 1)


def test_a_line_of_the_result_does_not_run_into_the_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradcheck_dist.cli import progress

    shown: list[str] = []

    class Status:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: shown.append(name)

    display = progress.Progress("training")
    display._status = Status()  # type: ignore[assignment]
    monkeypatch.setattr("builtins.print", lambda line, **_: shown.append(line))
    display.say("ok")
    assert shown == ["stop", "ok", "start"]
